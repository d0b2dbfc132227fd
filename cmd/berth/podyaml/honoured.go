package podyaml

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// honoured lists every supported field, including everything below it. [] stands for any index.
// invalid checks the values.
var honoured = newFieldSet(
	"apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.labels", "metadata.annotations",
	"metadata.ownerReferences",

	"spec.restartPolicy", "spec.terminationGracePeriodSeconds", "spec.activeDeadlineSeconds",
	"spec.dnsPolicy", "spec.dnsConfig", "spec.hostname", "spec.hostAliases",
	"spec.hostNetwork", "spec.hostPID", "spec.hostIPC", "spec.hostUsers", "spec.shareProcessNamespace",
	"spec.os", "spec.enableServiceLinks", "spec.automountServiceAccountToken",

	"spec.volumes[].name",
	"spec.volumes[].emptyDir.medium", "spec.volumes[].emptyDir.sizeLimit", "spec.volumes[].emptyDir.mode",
	"spec.volumes[].hostPath.path", "spec.volumes[].hostPath.type",
	"spec.volumes[].configMap", "spec.volumes[].secret", "spec.volumes[].downwardAPI",
	"spec.volumes[].projected.defaultMode", "spec.volumes[].projected.sources[].configMap",
	"spec.volumes[].projected.sources[].secret", "spec.volumes[].projected.sources[].downwardAPI",
	"spec.volumes[].persistentVolumeClaim", "spec.volumes[].image.reference", "spec.volumes[].image.pullPolicy",

	"spec.securityContext.seLinuxOptions",
	"spec.securityContext.runAsUser", "spec.securityContext.runAsGroup", "spec.securityContext.runAsNonRoot",
	"spec.securityContext.supplementalGroups", "spec.securityContext.supplementalGroupsPolicy",
	"spec.securityContext.fsGroup", "spec.securityContext.fsGroupChangePolicy",
	"spec.securityContext.sysctls", "spec.securityContext.seccompProfile", "spec.securityContext.appArmorProfile",
).with("spec.initContainers[].", "restartPolicy").with("spec.initContainers[].", containerFields...).
	with("spec.containers[].", containerFields...)

var containerFields = slices.Concat([]string{
	"name", "image", "imagePullPolicy", "command", "args", "workingDir", "tty", "stdin", "stdinOnce", "ports",
	"envFrom", "env[].name", "env[].value", "env[].valueFrom.fieldRef", "env[].valueFrom.resourceFieldRef",
	"env[].valueFrom.configMapKeyRef", "env[].valueFrom.secretKeyRef",
	"resources.limits", "resources.requests",
	"volumeMounts[].name", "volumeMounts[].mountPath", "volumeMounts[].readOnly", "volumeMounts[].recursiveReadOnly",
	"volumeMounts[].subPath", "volumeMounts[].subPathExpr", "volumeMounts[].mountPropagation",
	"volumeMounts[].bindMountOptions",
	"lifecycle.postStart.exec", "lifecycle.postStart.sleep", "lifecycle.postStart.httpGet",
	"lifecycle.preStop.exec", "lifecycle.preStop.sleep", "lifecycle.preStop.httpGet",
	"lifecycle.stopSignal",
	"securityContext.capabilities", "securityContext.privileged", "securityContext.seLinuxOptions",
	"securityContext.runAsUser", "securityContext.runAsGroup", "securityContext.runAsNonRoot",
	"securityContext.readOnlyRootFilesystem", "securityContext.allowPrivilegeEscalation", "securityContext.procMount",
	"securityContext.seccompProfile", "securityContext.appArmorProfile",
	// These have no effect on one pod without an API server, and Kubernetes sets them by default.
	"terminationMessagePath", "terminationMessagePolicy", "resizePolicy",
}, probeFields("startupProbe"), probeFields("livenessProbe"), probeFields("readinessProbe"))

func probeFields(probe string) []string {
	var out []string
	for _, field := range []string{
		"exec", "httpGet", "tcpSocket", "grpc", "initialDelaySeconds", "timeoutSeconds", "periodSeconds",
		"successThreshold", "failureThreshold", "terminationGracePeriodSeconds",
	} {
		out = append(out, probe+"."+field)
	}
	return out
}

// ignorable lists the fields that a run ignores with a warning, and the reasons.
var ignorable = map[string]string{
	"spec.nodeName": noSchedule, "spec.nodeSelector": noSchedule, "spec.affinity": noSchedule,
	"spec.schedulerName": noSchedule, "spec.tolerations": noSchedule, "spec.topologySpreadConstraints": noSchedule,
	"spec.priorityClassName": noSchedule, "spec.priority": noSchedule, "spec.preemptionPolicy": noSchedule,
	"spec.schedulingGates": noSchedule, "spec.schedulingGroup": noSchedule, "spec.overhead": noSchedule,
	"spec.serviceAccountName": noAPI, "spec.serviceAccount": noAPI, "spec.readinessGates": noAPI,
	"spec.evictionResponders": noAPI,
	"spec.subdomain":          noDNS, "spec.setHostnameAsFQDN": noDNS,
	"spec.imagePullSecrets":                    "the daemon pulls with its own credentials",
	"spec.securityContext.seLinuxChangePolicy": notEnforced,
}

// reasons replace the general text of a refusal. The key is the end of the field's path.
var reasons = []struct{ end, reason string }{
	{"serviceAccountToken", noAPI}, {"clusterTrustBundle", noAPI}, {"podCertificate", noAPI},
	{"csi", "this command has no CSI drivers"},
	{"tcpSocket", "only exec, httpGet and sleep handlers are run"},
	{"runtimeClassName", "name the handler with --runtime-handler instead"},
}

const notSupported = "not supported"

func reasonFor(path string) string {
	name := path[strings.LastIndexByte(path, '.')+1:]
	name, _, _ = strings.Cut(name, "[")
	for _, r := range reasons {
		if r.end == name {
			return r.reason
		}
	}
	return notSupported
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

// unsupported returns every field of the pod that is set but neither in honoured nor in ignorable,
// and those in ignorable. A field is set if its value is not the zero value, or is an empty but
// present object.
func unsupported(pod *corev1.Pod) (problems, ignored []Problem) {
	w := walker{allowed: honoured}
	w.walk("", "", reflect.ValueOf(pod))
	return w.problems, w.ignored
}

// walker walks through a value by its JSON names.
type walker struct {
	allowed  fieldSet
	problems []Problem
	ignored  []Problem
}

// walk visits v at path. pattern is path without indexes.
func (w *walker) walk(path, pattern string, v reflect.Value) {
	switch {
	case isUnset(v) || w.allowed.fields[pattern]:
		return
	case ignorable[pattern] != "":
		w.ignored = append(w.ignored, Problem{path, ignorable[pattern]})
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

// needsProcess returns the fields that need a supervising process.
func needsProcess(pod *corev1.Pod) []Problem {
	var found []Problem
	if p := pod.Spec.RestartPolicy; p != "" && p != corev1.RestartPolicyNever {
		found = append(found, Problem{"spec.restartPolicy", noProcess})
	}
	if pod.Spec.ActiveDeadlineSeconds != nil {
		found = append(found, Problem{"spec.activeDeadlineSeconds", noProcess})
	}
	for _, c := range containers(pod) {
		if c.Sidecar() {
			found = append(found, Problem{c.Path + ".restartPolicy", noProcess})
		}
		for _, probe := range []struct {
			name string
			set  bool
		}{
			{"startupProbe", c.StartupProbe != nil}, {"livenessProbe", c.LivenessProbe != nil},
			{"readinessProbe", c.ReadinessProbe != nil},
		} {
			if probe.set {
				found = append(found, Problem{c.Path + "." + probe.name, noProcess})
			}
		}
	}
	return found
}

// tokenVolume is the prefix of the volume that the API server adds to each pod for its service
// account's token.
const tokenVolume = "kube-api-access-"

// removeIgnored removes values that the runtime must not see, and returns their fields.
func removeIgnored(pod *corev1.Pod) []Problem {
	var ignored []Problem
	spec := &pod.Spec
	if spec.DNSPolicy == corev1.DNSClusterFirst || spec.DNSPolicy == corev1.DNSClusterFirstWithHostNet {
		spec.DNSPolicy = corev1.DNSDefault
		ignored = append(ignored, Problem{"spec.dnsPolicy", noDNS})
	}
	if value(spec.AutomountServiceAccountToken) {
		spec.AutomountServiceAccountToken = nil
		ignored = append(ignored, Problem{"spec.automountServiceAccountToken", noAPI})
	}
	for i := range spec.Volumes {
		if isTokenVolume(&spec.Volumes[i]) {
			ignored = append(ignored, Problem{index("spec.volumes", i), noAPI})
			removeVolume(pod, spec.Volumes[i].Name)
			break // the API server adds one
		}
	}
	for _, c := range containers(pod) {
		for list, resources := range map[string]corev1.ResourceList{
			"limits": c.Resources.Limits, "requests": c.Resources.Requests,
		} {
			if _, set := resources[corev1.ResourceEphemeralStorage]; set {
				delete(resources, corev1.ResourceEphemeralStorage)
				path := c.Path + ".resources." + list + "." + string(corev1.ResourceEphemeralStorage)
				ignored = append(ignored, Problem{path, notEnforced})
			}
		}
	}
	return ignored
}

func isTokenVolume(v *corev1.Volume) bool {
	return strings.HasPrefix(v.Name, tokenVolume) && v.Projected != nil &&
		slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool { return s.ServiceAccountToken != nil })
}

// removeVolume removes a volume and its mounts.
func removeVolume(pod *corev1.Pod, name string) {
	pod.Spec.Volumes = slices.DeleteFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	for _, c := range containers(pod) {
		c.VolumeMounts = slices.DeleteFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == name })
	}
}

// isSidecar reports a restartable init container (KEP-753).
func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
