// Package podyaml converts a Kubernetes Pod manifest to CRI requests, as kubelet does without an
// API server. It is pure: callers pass facts about the host and the pod's files.
//
// # Contract
//
// Parse accepts a manifest only if every field in it is supported. Otherwise it lists all
// unsupported fields by path. The list of supported fields (honoured) is explicit, so Parse refuses
// a field of a later Kubernetes version instead of ignoring it.
//
// Defaults are those of the Kubernetes API server (pkg/apis/core/v1/defaults.go), with two
// exceptions for lack of a cluster: dnsPolicy is Default, and an unset seccompProfile is
// RuntimeDefault, as with kubelet's --seccomp-default.
package podyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	corev1 "k8s.io/api/core/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
	goyaml "sigs.k8s.io/yaml/goyaml.v2"
)

// Problem is one reason why a manifest cannot run.
type Problem struct {
	Path   string // field path, e.g. spec.containers[0].livenessProbe; empty for the whole manifest
	Reason string
}

func (p Problem) String() string {
	if p.Path == "" {
		return p.Reason
	}
	return p.Path + ": " + p.Reason
}

// Refused is the error of a manifest that cannot run. It has all reasons, in the order of the
// manifest's fields.
type Refused struct{ Problems []Problem }

// Error lists the problems, one per line if there are several.
func (r *Refused) Error() string {
	if len(r.Problems) == 1 {
		return "refused: " + r.Problems[0].String()
	}
	lines := make([]string, len(r.Problems))
	for i, p := range r.Problems {
		lines[i] = "  " + p.String()
	}
	return "refused:\n" + strings.Join(lines, "\n")
}

// Mode describes how the caller runs a pod.
type Mode struct {
	// Detached means that no process stays with the running pod, so nothing restarts its
	// containers. Parse refuses fields that need that.
	Detached bool
}

// Parse decodes a manifest (a single YAML or JSON document), sets defaults, and checks that every
// field is supported. The error is *Refused unless the text is not YAML.
func Parse(manifest []byte, mode Mode) (*corev1.Pod, error) {
	pod, err := decode(manifest)
	if err != nil {
		return nil, err
	}
	problems := unsupported(pod)
	if mode.Detached {
		problems = append(problems, needsSupervisor(pod)...)
	}
	setDefaults(pod)
	problems = append(problems, invalid(pod)...)
	if len(problems) > 0 {
		return nil, &Refused{problems}
	}
	return pod, nil
}

// decode decodes exactly one document. It refuses unknown, duplicate and wrongly-cased fields by
// their paths.
func decode(manifest []byte) (*corev1.Pod, error) {
	if err := oneDocument(manifest); err != nil {
		return nil, err
	}
	raw, err := yaml.YAMLToJSONStrict(manifest)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	pod := &corev1.Pod{}
	strict, err := kjson.UnmarshalStrict(raw, pod)
	if err != nil {
		if problems := badQuantities(raw); len(problems) > 0 {
			return nil, &Refused{problems}
		}
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	if pod.APIVersion != "v1" || pod.Kind != "Pod" {
		return nil, refuse("", "want apiVersion v1, kind Pod; this is apiVersion %q, kind %q", pod.APIVersion, pod.Kind)
	}
	if len(strict) > 0 {
		problems := make([]Problem, len(strict))
		for i, err := range strict {
			problems[i].Reason = err.Error()
		}
		return nil, &Refused{problems}
	}
	return pod, nil
}

// oneDocument refuses a stream of several documents, because sigs.k8s.io/yaml reads the first one
// and silently drops the rest.
func oneDocument(manifest []byte) error {
	decoder := goyaml.NewDecoder(bytes.NewReader(manifest))
	documents := 0
	for {
		var document any
		err := decoder.Decode(&document)
		switch {
		case errors.Is(err, io.EOF) && documents == 1:
			return nil
		case errors.Is(err, io.EOF):
			return refuse("", "want one Pod, the manifest has %d documents", documents)
		case err != nil:
			return fmt.Errorf("read manifest: %w", err)
		case document != nil:
			documents++
		}
	}
}

// refuse returns a Refused with one problem.
func refuse(path, format string, args ...any) *Refused {
	return &Refused{[]Problem{{path, fmt.Sprintf(format, args...)}}}
}
