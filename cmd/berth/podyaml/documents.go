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

// object is one Kubernetes object of a file, not yet decoded.
type object struct {
	apiVersion, kind, namespace, name string

	fields map[string]any
}

// readObjects returns the objects of all documents.
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
		if fields != nil { // else it has only comments
			out = append(out, newObject(fields))
		}
	}
	if len(out) == 0 {
		return nil, &Refused{[]Problem{{Reason: "the manifest is empty"}}}
	}
	return out, nil
}

// readDocument decodes one document to JSON values. It refuses duplicate keys, and a document with
// a second one after "...", because sigs.k8s.io/yaml silently drops the second document.
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
		return nil, &Refused{[]Problem{{Reason: "a document must be an object with apiVersion and kind"}}}
	}
	return fields, nil
}

func newObject(fields map[string]any) object {
	o := object{fields: fields}
	o.apiVersion, _ = fields["apiVersion"].(string)
	o.kind, _ = fields["kind"].(string)
	if meta, ok := fields["metadata"].(map[string]any); ok {
		o.name, _ = meta["name"].(string)
		o.namespace, _ = meta["namespace"].(string)
	}
	return o
}

// decodeObject decodes an object. It adds a problem for each unknown field, each field with wrong
// case and each malformed quantity, and then returns nil.
func decodeObject[T any](p *parser, o object) *T {
	into := new(T)
	if bad := badQuantities("", o.fields, reflect.TypeFor[T]()); len(bad) > 0 {
		for _, problem := range bad {
			p.add(o, problem.Path, problem.Reason)
		}
		return nil
	}
	raw, err := json.Marshal(o.fields)
	var strict []error
	if err == nil {
		strict, err = kjson.UnmarshalStrict(raw, into)
	}
	if err != nil {
		strict = append(strict, err)
	}
	for _, err := range strict {
		path, reason := "", err.Error()
		if quoted, isUnknown := strings.CutPrefix(reason, "unknown field "); isUnknown {
			path, reason = strings.Trim(quoted, `"`), "unknown field"
		}
		p.add(o, path, reason)
	}
	if len(strict) > 0 {
		return nil
	}
	return into
}
