package podyaml

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// needsKubelet is why a field or an object is refused.
const needsKubelet = "needs a kubelet: see docs/standalone.md"

// honoured lists every supported field, including everything below it. [] stands for any index.
// Init containers have the fields of containers. checker checks the values.
var honoured = []string{
	"apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.labels", "metadata.annotations",
	"spec.restartPolicy", "spec.terminationGracePeriodSeconds", "spec.hostNetwork", "spec.hostname",
	"spec.volumes[].name", "spec.volumes[].emptyDir.medium", "spec.volumes[].emptyDir.sizeLimit",
	"spec.volumes[].hostPath.path", "spec.volumes[].hostPath.type",
	"spec.securityContext.runAsUser", "spec.securityContext.runAsGroup", "spec.securityContext.runAsNonRoot",
	"spec.securityContext.supplementalGroups", "spec.securityContext.fsGroup", "spec.securityContext.seLinuxOptions",
	"spec.securityContext.sysctls", "spec.securityContext.seccompProfile", "spec.securityContext.appArmorProfile",

	"spec.containers[].name", "spec.containers[].image", "spec.containers[].imagePullPolicy",
	"spec.containers[].command", "spec.containers[].args", "spec.containers[].workingDir", "spec.containers[].ports",
	"spec.containers[].envFrom", "spec.containers[].env[].name", "spec.containers[].env[].value",
	"spec.containers[].env[].valueFrom.configMapKeyRef", "spec.containers[].env[].valueFrom.secretKeyRef",
	"spec.containers[].resources.limits", "spec.containers[].resources.requests",
	"spec.containers[].volumeMounts[].name", "spec.containers[].volumeMounts[].mountPath",
	"spec.containers[].volumeMounts[].readOnly",
	"spec.containers[].securityContext.capabilities", "spec.containers[].securityContext.privileged",
	"spec.containers[].securityContext.seLinuxOptions",
	"spec.containers[].securityContext.runAsUser", "spec.containers[].securityContext.runAsGroup",
	"spec.containers[].securityContext.runAsNonRoot", "spec.containers[].securityContext.readOnlyRootFilesystem",
	"spec.containers[].securityContext.allowPrivilegeEscalation",
	"spec.containers[].securityContext.seccompProfile", "spec.containers[].securityContext.appArmorProfile",
}

// hasHonoured reports whether fields below a pattern are honoured.
func hasHonoured(pattern string) bool {
	return slices.ContainsFunc(honoured, func(field string) bool {
		rest, below := strings.CutPrefix(field, pattern)
		return below && (pattern == "" || rest[0] == '.' || rest[0] == '[')
	})
}

// unsupported returns every field of the pod that is set but not in honoured. A field is set if its
// value is not the zero value, or is an empty but present object.
func unsupported(pod *corev1.Pod) []Problem {
	w := walker{}
	w.walk("", "", reflect.ValueOf(pod))
	return w.problems
}

// walker walks through a value by its JSON names.
type walker struct{ problems []Problem }

// walk visits v at path. pattern is path without indexes.
func (w *walker) walk(path, pattern string, v reflect.Value) {
	pattern = strings.Replace(pattern, "spec.initContainers", "spec.containers", 1)
	switch {
	case isUnset(v) || slices.Contains(honoured, pattern):
		return
	case !hasHonoured(pattern):
		w.problems = append(w.problems, Problem{path, needsKubelet})
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		w.walk(path, pattern, v.Elem())
	case reflect.Struct:
		w.walkStruct(path, pattern, v)
	case reflect.Slice:
		for i := range v.Len() {
			w.walk(index(path, i), pattern+"[]", v.Index(i))
		}
	}
}

func (w *walker) walkStruct(path, pattern string, v reflect.Value) {
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if name == "" { // embedded: its fields belong to this struct
			w.walk(path, pattern, v.Field(i))
			continue
		}
		w.walk(join(path, name), join(pattern, name), v.Field(i))
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

// isUnset reports whether a value is the value of an omitted field, or equivalent: an empty list or
// null.
func isUnset(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	}
	return v.IsZero()
}

// oneOf adds a problem unless value is zero or one of allowed.
func oneOf[T ~string](c *checker, path string, value T, allowed ...T) {
	if value == "" || slices.Contains(allowed, value) {
		return
	}
	names := make([]string, len(allowed))
	for i, a := range allowed {
		names[i] = string(a)
	}
	c.add(path, "%q is not possible here, want %s", value, strings.Join(names, " or "))
}
