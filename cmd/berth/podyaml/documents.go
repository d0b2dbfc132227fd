package podyaml

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
	goyaml "sigs.k8s.io/yaml/goyaml.v2"
)

// object is one Kubernetes object of a manifest, not yet decoded.
type object struct {
	apiVersion, kind, namespace, name string

	fields map[string]any
}

func (o object) String() string { return strings.TrimSpace(o.kind + " " + o.name) }

// readObjects returns the objects of all documents and lists, without the fields that the API
// server sets.
func readObjects(text []byte) ([]object, error) {
	var out []object
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read manifest: %w", err)
		}
		fields, err := readDocument(document)
		if err != nil {
			return nil, err
		}
		if fields == nil {
			continue // only comments
		}
		if out, err = appendObjects(out, fields); err != nil {
			return nil, err
		}
	}
	if len(out) == 0 {
		return nil, refuse("", "the manifest is empty")
	}
	return out, nil
}

// readDocument decodes one document to JSON values. It refuses duplicate keys, and a document with
// a second one after "...", because sigs.k8s.io/yaml silently drops the second one.
func readDocument(document []byte) (map[string]any, error) {
	var first, second any
	decoder := goyaml.NewDecoder(bytes.NewReader(document))
	if err := decoder.Decode(&first); err == nil {
		if err := decoder.Decode(&second); !errors.Is(err, io.EOF) {
			return nil, errors.Join(errors.New("read manifest: documents must be separated by a line ---"), err)
		}
	}
	raw, err := yaml.YAMLToJSONStrict(document)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	var content any
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw, &content); err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	if content == nil {
		return nil, nil
	}
	fields, ok := content.(map[string]any)
	if !ok {
		return nil, refuse("", "a document must be an object with apiVersion and kind")
	}
	return fields, nil
}

// appendObjects appends a document's object, or the objects of a List.
func appendObjects(out []object, fields map[string]any) ([]object, error) {
	kind, _ := fields["kind"].(string)
	items, isList := fields["items"].([]any)
	if !strings.HasSuffix(kind, "List") || !isList {
		return append(out, newObject(fields)), nil
	}
	for i, item := range items {
		element, ok := item.(map[string]any)
		if !ok {
			return nil, refuse(index("items", i), "must be an object")
		}
		if _, typed := element["kind"]; !typed { // the elements of a typed list, such as PodList
			element["kind"], element["apiVersion"] = strings.TrimSuffix(kind, "List"), fields["apiVersion"]
		}
		out = append(out, newObject(element))
	}
	return out, nil
}

// serverFields are fields of metadata that the API server sets. Exports of kubectl contain them.
var serverFields = []string{
	"uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
	"managedFields", "ownerReferences", "finalizers", "selfLink",
}

func newObject(fields map[string]any) object {
	o := object{fields: fields}
	o.apiVersion, _ = fields["apiVersion"].(string)
	o.kind, _ = fields["kind"].(string)
	delete(fields, "status")
	if meta, ok := fields["metadata"].(map[string]any); ok {
		for _, name := range serverFields {
			delete(meta, name)
		}
		if name, _ := meta["name"].(string); name == "" {
			if prefix, _ := meta["generateName"].(string); prefix != "" {
				meta["name"] = strings.TrimRight(prefix, "-.")
			}
		}
		delete(meta, "generateName")
		o.name, _ = meta["name"].(string)
		o.namespace, _ = meta["namespace"].(string)
	}
	return o
}

// decodeObject decodes an object. It adds a problem for each unknown field, each field with wrong
// case, and each malformed quantity.
func decodeObject[T any](p *parser, o object) (*T, bool) {
	into := new(T)
	problems := badQuantities(o.fields, into)
	if len(problems) == 0 {
		raw, err := json.Marshal(o.fields)
		var strict []error
		if err == nil {
			strict, err = kjson.UnmarshalStrict(raw, into)
		}
		if err != nil {
			strict = append(strict, err)
		}
		for _, err := range strict {
			problems = append(problems, Problem{Reason: explainField(err.Error(), reflect.TypeOf(into))})
		}
	}
	for _, problem := range problems {
		problem.Path = p.where(o.kind, o.name) + problem.Path
		if problem.Path != "" && strings.HasSuffix(problem.Path, ": ") {
			problem.Path = strings.TrimSuffix(problem.Path, ": ")
		}
		p.problems = append(p.problems, problem)
	}
	return into, len(problems) == 0
}
