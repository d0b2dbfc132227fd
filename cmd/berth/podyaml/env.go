package podyaml

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// environment is a container's environment in order, without duplicate names.
type environment struct {
	order  []string
	values map[string]string
}

func (e *environment) set(name, value string) {
	if _, known := e.values[name]; !known {
		e.order = append(e.order, name)
	}
	e.values[name] = value
}

func (e *environment) lookup(name string) (string, bool) {
	v, ok := e.values[name]
	return v, ok
}

func (e *environment) expand(text string) string { return Expand(text, e.lookup) }

func (e *environment) expandAll(texts []string) []string {
	out := make([]string, len(texts))
	for i, t := range texts {
		out[i] = e.expand(t)
	}
	return out
}

func (e *environment) keyValues() []*runtimeapi.KeyValue {
	out := make([]*runtimeapi.KeyValue, len(e.order))
	for i, name := range e.order {
		out[i] = &runtimeapi.KeyValue{Key: name, Value: []byte(e.values[name])}
	}
	return out
}

// environment returns the variables of a container: those of envFrom, then those of env, which
// replace the former. A value in env may refer to earlier ones in env.
func (p *Plan) environment(c Container, podIPs []string) (*environment, error) {
	all := &environment{values: map[string]string{}}
	for i := range c.EnvFrom {
		if err := p.addEnvFrom(all, &c.EnvFrom[i]); err != nil {
			return nil, fmt.Errorf("%s: %w", index(c.Path+".envFrom", i), err)
		}
	}
	own := &environment{values: map[string]string{}}
	for i := range c.Env {
		v := &c.Env[i]
		text, set, err := p.envValue(c, v, own, podIPs)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", index(c.Path+".env", i), err)
		}
		if set {
			own.set(v.Name, text)
			all.set(v.Name, text)
		}
	}
	return all, nil
}

// addEnvFrom adds the keys of a ConfigMap or Secret that are possible names of variables.
func (p *Plan) addEnvFrom(env *environment, from *corev1.EnvFromSource) error {
	kind, name, optional := envFromSource(from)
	data, ok := p.Objects.lookup(kind, p.Pod.Namespace, name)
	if !ok && !optional {
		return missingObject(kind, name)
	}
	for _, key := range slices.Sorted(maps.Keys(data)) {
		if key = from.Prefix + key; len(validation.IsRelaxedEnvVarName(key)) == 0 {
			env.set(key, string(data[key[len(from.Prefix):]]))
		}
	}
	return nil
}

func envFromSource(from *corev1.EnvFromSource) (kind, name string, optional bool) {
	if from.SecretRef != nil {
		return secretKind, from.SecretRef.Name, value(from.SecretRef.Optional)
	}
	if from.ConfigMapRef != nil {
		return configMapKind, from.ConfigMapRef.Name, value(from.ConfigMapRef.Optional)
	}
	return "", "", false
}

// envValue returns the value of a variable, or false if its optional source does not exist.
func (p *Plan) envValue(c Container, v *corev1.EnvVar, sofar *environment,
	podIPs []string) (text string, set bool, err error) {
	switch s := v.ValueFrom; {
	case s == nil:
		return sofar.expand(v.Value), true, nil
	case s.FieldRef != nil:
		text, err = p.fieldValue(s.FieldRef.FieldPath, podIPs)
		return text, true, err
	case s.ResourceFieldRef != nil:
		text, err = p.resourceValue(c.Container, s.ResourceFieldRef)
		return text, true, err
	case s.ConfigMapKeyRef != nil:
		return p.keyValue(configMapKind, s.ConfigMapKeyRef.Name, s.ConfigMapKeyRef.Key, s.ConfigMapKeyRef.Optional)
	case s.SecretKeyRef != nil:
		return p.keyValue(secretKind, s.SecretKeyRef.Name, s.SecretKeyRef.Key, s.SecretKeyRef.Optional)
	}
	return "", true, nil // "valueFrom: {}" sets an empty value
}

// keyValue returns the value of one key of a ConfigMap or Secret.
func (p *Plan) keyValue(kind, name, key string, optional *bool) (text string, set bool, err error) {
	data, ok := p.Objects.lookup(kind, p.Pod.Namespace, name)
	if !ok && !value(optional) {
		return "", false, missingObject(kind, name)
	}
	content, ok := data[key]
	if !ok && !value(optional) {
		return "", false, missingKey(kind, name, key)
	}
	return string(content), ok, nil
}

// fieldPaths are the fields of the downward API, without maps, for environment variables.
var fieldPaths = map[string]func(p *Plan, podIPs []string) string{
	"metadata.name":      func(p *Plan, _ []string) string { return p.Pod.Name },
	"metadata.namespace": func(p *Plan, _ []string) string { return p.Pod.Namespace },
	"metadata.uid":       func(p *Plan, _ []string) string { return p.UID },
	"spec.nodeName":      func(p *Plan, _ []string) string { return p.Host.NodeName },
	"status.hostIP":      func(p *Plan, _ []string) string { return first(p.Host.IPs) },
	"status.hostIPs":     func(p *Plan, _ []string) string { return strings.Join(p.Host.IPs, ",") },
	"status.podIP":       func(_ *Plan, ips []string) string { return first(ips) },
	"status.podIPs":      func(_ *Plan, ips []string) string { return strings.Join(ips, ",") },
}

func first(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

// mapKey splits metadata.labels['key'] into its two parts.
func mapKey(fieldPath string) (field, key string, ok bool) {
	field, rest, ok := strings.Cut(fieldPath, "['")
	key, closed := strings.CutSuffix(rest, "']")
	return field, key, ok && closed
}

// checkFieldRef reports a reference that no run can resolve.
func checkFieldRef(ref *corev1.ObjectFieldSelector) error {
	if ref.APIVersion != "" && ref.APIVersion != "v1" {
		return fmt.Errorf("apiVersion %q is not v1", ref.APIVersion)
	}
	if fieldPaths[ref.FieldPath] != nil {
		return nil
	}
	field, key, ok := mapKey(ref.FieldPath)
	if !ok || (field != "metadata.labels" && field != "metadata.annotations") {
		return fmt.Errorf("field %q cannot be resolved", ref.FieldPath)
	}
	if problems := validation.IsQualifiedName(strings.ToLower(key)); len(problems) > 0 {
		return fmt.Errorf("key %q: %s", key, strings.Join(problems, "; "))
	}
	return nil
}

func (p *Plan) fieldValue(fieldPath string, podIPs []string) (string, error) {
	if get := fieldPaths[fieldPath]; get != nil {
		v := get(p, podIPs)
		if v == "" {
			return "", fmt.Errorf("%s is not known", fieldPath)
		}
		return v, nil
	}
	field, key, _ := mapKey(fieldPath)
	if field == "metadata.labels" {
		return p.Pod.Labels[key], nil
	}
	return p.Pod.Annotations[key], nil
}

// refContainer returns the container of a resource reference, by default its own.
func refContainer(pod *corev1.Pod, own *corev1.Container,
	ref *corev1.ResourceFieldSelector) (*corev1.Container, error) {
	if ref.ContainerName == "" {
		return own, nil
	}
	for _, c := range containers(pod) {
		if c.Name == ref.ContainerName {
			return c.Container, nil
		}
	}
	return nil, fmt.Errorf("there is no container %q", ref.ContainerName)
}

func checkResourceRef(pod *corev1.Pod, own *corev1.Container, ref *corev1.ResourceFieldSelector) error {
	kind, name, _ := strings.Cut(ref.Resource, ".")
	if (kind != "limits" && kind != "requests") || !knownResource(corev1.ResourceName(name)) {
		return fmt.Errorf("resource %q cannot be resolved", ref.Resource)
	}
	if ref.Divisor.Sign() < 0 {
		return fmt.Errorf("divisor %s is negative", ref.Divisor.String())
	}
	_, err := refContainer(pod, own, ref)
	return err
}

// resourceValue resolves a resource reference. An unset limit is the host's capacity. It rounds the
// quotient up (ConvertResourceCPUToString and related functions).
func (p *Plan) resourceValue(own *corev1.Container, ref *corev1.ResourceFieldSelector) (string, error) {
	c, err := refContainer(p.Pod, own, ref)
	if err != nil {
		return "", err
	}
	kind, rest, _ := strings.Cut(ref.Resource, ".")
	name := corev1.ResourceName(rest)
	list := c.Resources.Requests
	if kind == "limits" {
		list = c.Resources.Limits
	}
	q, set := list[name]
	if kind == "limits" && (!set || q.IsZero()) {
		q = p.Host.capacity(name)
	}
	divisor := ref.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	amount, by := q.Value(), divisor.Value()
	if name == corev1.ResourceCPU {
		amount, by = q.MilliValue(), divisor.MilliValue()
	}
	return strconv.FormatInt(int64(math.Ceil(float64(amount)/float64(by))), 10), nil
}
