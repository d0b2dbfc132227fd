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
// checker checks the values.
var honoured = newFieldSet(
	"apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.labels", "metadata.annotations",
	"spec.restartPolicy", "spec.terminationGracePeriodSeconds", "spec.hostNetwork", "spec.hostname",
	"spec.volumes[].name", "spec.volumes[].emptyDir.medium", "spec.volumes[].emptyDir.sizeLimit",
	"spec.volumes[].hostPath.path", "spec.volumes[].hostPath.type",
	"spec.securityContext.runAsUser", "spec.securityContext.runAsGroup", "spec.securityContext.runAsNonRoot",
	"spec.securityContext.supplementalGroups", "spec.securityContext.fsGroup", "spec.securityContext.seLinuxOptions",
	"spec.securityContext.sysctls", "spec.securityContext.seccompProfile", "spec.securityContext.appArmorProfile",
).with("spec.initContainers[].", containerFields...).with("spec.containers[].", containerFields...)

var containerFields = []string{
	"name", "image", "imagePullPolicy", "command", "args", "workingDir", "ports",
	"envFrom", "env[].name", "env[].value", "env[].valueFrom.configMapKeyRef", "env[].valueFrom.secretKeyRef",
	"resources.limits", "resources.requests",
	"volumeMounts[].name", "volumeMounts[].mountPath", "volumeMounts[].readOnly",
	"securityContext.capabilities", "securityContext.privileged", "securityContext.seLinuxOptions",
	"securityContext.runAsUser", "securityContext.runAsGroup", "securityContext.runAsNonRoot",
	"securityContext.readOnlyRootFilesystem", "securityContext.allowPrivilegeEscalation",
	"securityContext.seccompProfile", "securityContext.appArmorProfile",
}

// fieldSet is a set of field patterns, with the parents of these patterns.
type fieldSet struct{ fields, parents map[string]bool }

func newFieldSet(patterns ...string) fieldSet {
	return fieldSet{map[string]bool{}, map[string]bool{"": true}}.with("", patterns...)
}

// with adds patterns, each after prefix, and returns the set.
func (s fieldSet) with(prefix string, patterns ...string) fieldSet {
	for _, pattern := range patterns {
		pattern = prefix + pattern
		s.fields[pattern] = true
		for i, c := range pattern {
			if c == '.' || c == '[' {
				s.parents[pattern[:i]] = true
			}
		}
	}
	return s
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
	switch {
	case isUnset(v) || honoured.fields[pattern]:
		return
	case !honoured.parents[pattern]:
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

// isUnset reports whether a value is that of an omitted field, or equivalent to it: an empty list
// or null.
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
