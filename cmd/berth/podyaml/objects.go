package podyaml

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Objects are the ConfigMaps, Secrets and claims of a manifest. Parse fills them. They do not
// change later.
type Objects struct {
	data   map[objectKey]map[string][]byte
	claims map[objectKey]bool
}

// objectKey identifies a ConfigMap, Secret or PersistentVolumeClaim.
type objectKey struct{ kind, namespace, name string }

func (k objectKey) String() string { return k.kind + " " + k.name }

func newObjects() *Objects {
	return &Objects{data: map[objectKey]map[string][]byte{}, claims: map[objectKey]bool{}}
}

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

func (o *Objects) addClaim(namespace, name string) {
	o.claims[keyFor("PersistentVolumeClaim", namespace, name)] = true
}

// Claims returns the namespaces and names of the manifest's claims, sorted by name.
func (o *Objects) Claims() [][2]string {
	var out [][2]string
	for key := range o.claims {
		out = append(out, [2]string{key.namespace, key.name})
	}
	slices.SortFunc(out, func(a, b [2]string) int { return strings.Compare(a[0]+"/"+a[1], b[0]+"/"+b[1]) })
	return out
}

// addData adds the data of a ConfigMap or Secret. Keys become names of files and variables.
func (p *parser) addData(o object, data map[string][]byte) {
	for _, key := range slices.Sorted(maps.Keys(data)) {
		for _, message := range validation.IsConfigMapKey(key) {
			p.problems = append(p.problems, Problem{p.where(o.kind, o.name) + "data", fmt.Sprintf("%q: %s", key, message)})
		}
	}
	p.objects.data[keyFor(o.kind, o.namespace, o.name)] = data
}

func (p *parser) configMap(o object) {
	m, ok := decodeObject[corev1.ConfigMap](p, o)
	if !ok {
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
	s, ok := decodeObject[corev1.Secret](p, o)
	if !ok {
		return
	}
	data := map[string][]byte{}
	maps.Copy(data, s.Data)
	for key, text := range s.StringData {
		data[key] = []byte(text)
	}
	p.addData(o, data)
}

func (p *parser) claim(o object) {
	if c, ok := decodeObject[corev1.PersistentVolumeClaim](p, o); ok {
		if value(c.Spec.VolumeMode) == corev1.PersistentVolumeBlock {
			p.problems = append(p.problems, Problem{p.where(o.kind, o.name) + "spec.volumeMode", "Block is not supported"})
		}
		p.objects.addClaim(o.namespace, o.name)
	}
}
