package podyaml

import (
	"fmt"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// honoured lists every supported field, including everything below it. [] stands for any index.
// invalid checks the values.
var honoured = newFieldSet(
	"apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.labels", "metadata.annotations",

	"spec.restartPolicy", "spec.terminationGracePeriodSeconds",
	"spec.dnsPolicy", "spec.dnsConfig", "spec.hostname", "spec.hostAliases",
	"spec.hostNetwork", "spec.hostPID", "spec.hostIPC", "spec.hostUsers", "spec.shareProcessNamespace",
	"spec.os", "spec.tolerations", "spec.enableServiceLinks", "spec.automountServiceAccountToken",

	"spec.volumes[].name",
	"spec.volumes[].emptyDir.medium", "spec.volumes[].emptyDir.sizeLimit", "spec.volumes[].emptyDir.mode",
	"spec.volumes[].hostPath.path", "spec.volumes[].hostPath.type",

	"spec.securityContext.seLinuxOptions",
	"spec.securityContext.runAsUser", "spec.securityContext.runAsGroup", "spec.securityContext.runAsNonRoot",
	"spec.securityContext.supplementalGroups", "spec.securityContext.supplementalGroupsPolicy",
	"spec.securityContext.fsGroup", "spec.securityContext.fsGroupChangePolicy",
	"spec.securityContext.sysctls", "spec.securityContext.seccompProfile", "spec.securityContext.appArmorProfile",
).with("spec.initContainers[].", "restartPolicy").with("spec.initContainers[].", containerFields...).
	with("spec.containers[].", containerFields...)

var containerFields = []string{
	"name", "image", "imagePullPolicy", "command", "args", "workingDir", "tty", "ports",
	"env[].name", "env[].value", "env[].valueFrom.fieldRef", "env[].valueFrom.resourceFieldRef",
	"resources.limits", "resources.requests",
	"volumeMounts[].name", "volumeMounts[].mountPath", "volumeMounts[].readOnly", "volumeMounts[].recursiveReadOnly",
	"volumeMounts[].subPath", "volumeMounts[].subPathExpr", "volumeMounts[].mountPropagation",
	"volumeMounts[].bindMountOptions",
	"lifecycle.postStart.exec", "lifecycle.postStart.sleep", "lifecycle.preStop.exec", "lifecycle.preStop.sleep",
	"lifecycle.stopSignal",
	"securityContext.capabilities", "securityContext.privileged", "securityContext.seLinuxOptions",
	"securityContext.runAsUser", "securityContext.runAsGroup", "securityContext.runAsNonRoot",
	"securityContext.readOnlyRootFilesystem", "securityContext.allowPrivilegeEscalation", "securityContext.procMount",
	"securityContext.seccompProfile", "securityContext.appArmorProfile",
}

// reasons replace the general text of a refusal. The key is the end of the field's path.
var reasons = []struct{ end, reason string }{
	{"configMapKeyRef", noAPI}, {"secretKeyRef", noAPI}, {"envFrom", noAPI},
	{
		"configMap",
		noAPI,
	}, {"secret", noAPI}, {"projected", noAPI}, {"downwardAPI", "only emptyDir and hostPath volumes can be made"},
	{"persistentVolumeClaim", noAPI}, {"csi", "only emptyDir and hostPath volumes can be made"},
	{"imagePullSecrets", noAPI}, {"serviceAccountName", noAPI}, {"serviceAccount", noAPI},
	{"livenessProbe", noProbe}, {"readinessProbe", noProbe}, {"startupProbe", noProbe},
	{"httpGet", "only exec and sleep handlers are run"}, {"tcpSocket", "only exec and sleep handlers are run"},
	{"stdin", "nothing is attached to the container's stdin"},
	{"subdomain", "there is no cluster domain"}, {"setHostnameAsFQDN", "there is no cluster domain"},
	{"generateName", "give the pod a name"},
	{"uid", "every run has a uid of its own"},
	{"nodeName", noScheduler}, {"nodeSelector", noScheduler}, {"affinity", noScheduler}, {"schedulerName", noScheduler},
	{"topologySpreadConstraints", noScheduler}, {"priorityClassName", noScheduler}, {"priority", noScheduler},
	{"preemptionPolicy", noScheduler}, {"runtimeClassName", noAPI},
}

const (
	noAPI       = "there is no API server to read it from"
	noProbe     = "probes are not run"
	noScheduler = "this command does not schedule pods"
	noReason    = "not supported"
)

func reasonFor(path string) string {
	name := path[strings.LastIndexByte(path, '.')+1:]
	name, _, _ = strings.Cut(name, "[")
	for _, r := range reasons {
		if r.end == name {
			return r.reason
		}
	}
	return noReason
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
	w := walker{allowed: honoured}
	w.walk("", "", reflect.ValueOf(pod))
	return w.problems
}

// walker walks through a value by its JSON names.
type walker struct {
	allowed  fieldSet
	problems []Problem
}

// walk visits v at path. pattern is path without indexes.
func (w *walker) walk(path, pattern string, v reflect.Value) {
	switch {
	case isUnset(v) || w.allowed.fields[pattern]:
		return
	case !w.allowed.parents[pattern]:
		w.problems = append(w.problems, Problem{path, reasonFor(path)})
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		w.walk(path, pattern, v.Elem())
	case reflect.Struct:
		w.walkStruct(path, pattern, v)
	case reflect.Slice:
		for i := range v.Len() {
			w.walk(fmt.Sprintf("%s[%d]", path, i), pattern+"[]", v.Index(i))
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

// isUnset reports the value of an omitted field, or an equivalent one: an empty list, a null.
func isUnset(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	}
	return v.IsZero()
}

// needsSupervisor returns the fields that need a supervising process.
func needsSupervisor(pod *corev1.Pod) []Problem {
	var found []Problem
	if p := pod.Spec.RestartPolicy; p != "" && p != corev1.RestartPolicyNever {
		found = append(found,
			Problem{"spec.restartPolicy", fmt.Sprintf("%s: berth does not restart the containers of a detached pod", p)})
	}
	for i := range pod.Spec.InitContainers {
		if isSidecar(&pod.Spec.InitContainers[i]) {
			path := fmt.Sprintf("spec.initContainers[%d].restartPolicy", i)
			found = append(found, Problem{path, "Always: berth does not restart the containers of a detached pod"})
		}
	}
	return found
}

// isSidecar reports a restartable init container (KEP-753).
func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
