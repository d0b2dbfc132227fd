package podyaml

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

const (
	configMapKind = "ConfigMap"
	secretKind    = "Secret"
)

// Objects are the ConfigMaps and Secrets of a file. Parse fills them. They do not change later.
type Objects struct {
	data map[objectKey]map[string][]byte
}

// objectKey identifies a ConfigMap or Secret.
type objectKey struct{ kind, namespace, name string }

func keyFor(kind, namespace, name string) objectKey {
	if namespace == "" {
		namespace = corev1.NamespaceDefault
	}
	return objectKey{kind, namespace, name}
}

// lookup returns the data of a ConfigMap or Secret. Objects may be nil.
func (o *Objects) lookup(kind, namespace, name string) (map[string][]byte, bool) {
	if o == nil {
		return nil, false
	}
	data, ok := o.data[keyFor(kind, namespace, name)]
	return data, ok
}

// addData adds the data of a ConfigMap or Secret. Keys become names of variables.
func (p *parser) addData(o object, data map[string][]byte) {
	for _, key := range slices.Sorted(maps.Keys(data)) {
		for _, message := range validation.IsConfigMapKey(key) {
			p.add(o, "data", fmt.Sprintf("%q: %s", key, message))
		}
	}
	key := keyFor(o.kind, o.namespace, o.name)
	if _, twice := p.objects.data[key]; twice {
		p.add(o, "metadata.name", fmt.Sprintf("%q is there twice", o.name))
	}
	p.objects.data[key] = data
}

func (p *parser) configMap(o object) {
	m := decodeObject[corev1.ConfigMap](p, o)
	if m == nil {
		return
	}
	data := map[string][]byte{}
	for key, text := range m.Data {
		data[key] = []byte(text)
	}
	maps.Copy(data, m.BinaryData)
	p.addData(o, data)
}

func (p *parser) secret(o object) {
	s := decodeObject[corev1.Secret](p, o)
	if s == nil {
		return
	}
	data := map[string][]byte{}
	maps.Copy(data, s.Data)
	for key, text := range s.StringData {
		data[key] = []byte(text)
	}
	p.addData(o, data)
}

func missingObject(kind, name string) error {
	return fmt.Errorf("the manifest has no %s %q; add it to the file, or mark it optional", kind, name)
}

func missingKey(kind, name, key string) error {
	return fmt.Errorf("%s %q has no key %q", kind, name, key)
}
