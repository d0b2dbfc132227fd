package podyaml

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
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

// environment returns the variables of a container: first those of envFrom, then those of env. A
// variable in env replaces one of the same name in envFrom. A value in env may refer to all earlier
// variables, including those of envFrom (kubelet's makeEnvironmentVariables).
func (p *Plan) environment(c Container) (*environment, error) {
	env := &environment{values: map[string]string{}}
	for i := range c.EnvFrom {
		values, err := p.fromObject(&c.EnvFrom[i])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", index(c.Path+".envFrom", i), err)
		}
		for _, key := range slices.Sorted(maps.Keys(values)) {
			if name := c.EnvFrom[i].Prefix + key; len(validation.IsRelaxedEnvVarName(name)) == 0 {
				env.set(name, string(values[key]))
			}
		}
	}
	for i := range c.Env {
		v := &c.Env[i]
		text, set := env.expand(v.Value), true
		if v.ValueFrom != nil {
			var err error
			if text, set, err = p.fromKey(v.ValueFrom); err != nil {
				return nil, fmt.Errorf("%s: %w", index(c.Path+".env", i), err)
			}
		}
		if set {
			env.set(v.Name, text)
		}
	}
	return env, nil
}

// fromObject returns all values of the ConfigMap or Secret that envFrom names.
func (p *Plan) fromObject(from *corev1.EnvFromSource) (map[string][]byte, error) {
	var kind, name string
	var optional *bool
	switch {
	case (from.ConfigMapRef == nil) == (from.SecretRef == nil):
		return nil, errors.New("needs configMapRef or secretRef")
	case from.SecretRef != nil:
		kind, name, optional = secretKind, from.SecretRef.Name, from.SecretRef.Optional
	default:
		kind, name, optional = configMapKind, from.ConfigMapRef.Name, from.ConfigMapRef.Optional
	}
	data, ok := p.Objects.lookup(kind, p.Pod.Namespace, name)
	if !ok && !value(optional) {
		return nil, missingObject(kind, name)
	}
	return data, nil
}

// fromKey returns one value of a ConfigMap or Secret, or false if it is optional and does not
// exist.
func (p *Plan) fromKey(from *corev1.EnvVarSource) (text string, set bool, err error) {
	var kind, name, key string
	var optional *bool
	switch m, s := from.ConfigMapKeyRef, from.SecretKeyRef; {
	case m != nil:
		kind, name, key, optional = configMapKind, m.Name, m.Key, m.Optional
	case s != nil:
		kind, name, key, optional = secretKind, s.Name, s.Key, s.Optional
	default:
		return "", true, nil // "valueFrom: {}" sets an empty value
	}
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
