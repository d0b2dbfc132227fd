package podyaml

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
	goyaml "sigs.k8s.io/yaml/goyaml.v2"
)

// object is one Kubernetes object of a file, not yet decoded.
type object struct {
	apiVersion, kind, namespace, name string

	json []byte
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
		o, err := readDocument(document)
		if err != nil {
			return nil, err
		}
		if o != nil {
			out = append(out, *o)
		}
	}
	if len(out) == 0 {
		return nil, &Refused{[]Problem{{Reason: "the manifest is empty"}}}
	}
	return out, nil
}

// readDocument reads one document. It returns nil for one that has only comments. It refuses
// duplicate keys, and a document with a second one after "...", because sigs.k8s.io/yaml silently
// drops the second document.
func readDocument(document []byte) (*object, error) {
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
	if string(raw) == "null" {
		return nil, nil
	}
	var head struct {
		APIVersion, Kind string
		Metadata         struct{ Namespace, Name string }
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		reason := fmt.Sprintf("a document must be an object with apiVersion, kind and metadata: %v", err)
		return nil, &Refused{[]Problem{{Reason: reason}}}
	}
	return &object{head.APIVersion, head.Kind, head.Metadata.Namespace, head.Metadata.Name, raw}, nil
}

// decodeObject decodes an object. It adds a problem for each unknown field, each field with wrong
// case and a malformed value, and then returns nil.
func decodeObject[T any](p *parser, o object) *T {
	into := new(T)
	strict, err := kjson.UnmarshalStrict(o.json, into)
	if errors.Is(err, resource.ErrFormatWrong) {
		err = errors.New("a quantity, such as memory, is malformed; write for example 500m, 2 or 64Mi")
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
