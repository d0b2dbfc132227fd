// Package podyaml converts a file of Pods to CRI requests, as kubelet does. It is pure: callers
// pass facts about the host and the pod's files.
//
// # Contract
//
// Parse accepts Pods, and the ConfigMaps and Secrets that their environment names. It accepts only
// the fields in honoured, and behaves with them as kubelet and the API server do. It refuses every
// other field by its path, because that field needs a kubelet.
//
// The defaults are those of the API server (pkg/apis/core/v1/defaults.go), with two exceptions.
// Containers do not restart. An unset seccompProfile is RuntimeDefault, as with kubelet's
// --seccomp-default.
package podyaml

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Problem is one reason why a file cannot run.
type Problem struct {
	Path   string // field path, e.g. spec.containers[0].livenessProbe; empty for the whole file
	Reason string
}

func (p Problem) String() string {
	if p.Path == "" {
		return p.Reason
	}
	return p.Path + ": " + p.Reason
}

// Refused is the error of a file that cannot run. It has all reasons, in the order of the fields.
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

// Manifest is the content of a file.
type Manifest struct {
	Pods    []*corev1.Pod // in the order of the file; at least one
	Objects *Objects
}

// Parse decodes the YAML or JSON documents of a file, sets defaults, and checks every field of the
// pods. The error is *Refused unless the text is not YAML.
func Parse(text []byte) (*Manifest, error) {
	objects, err := readObjects(text)
	if err != nil {
		return nil, err
	}
	p := &parser{several: len(objects) > 1, objects: &Objects{data: map[objectKey]map[string][]byte{}}}
	for _, o := range objects {
		p.decode(o)
	}
	if len(p.pods) == 0 && len(p.problems) == 0 {
		return nil, &Refused{[]Problem{{Reason: "there is no Pod in it"}}}
	}
	for _, pod := range p.pods {
		p.check(pod)
	}
	if len(p.problems) > 0 {
		return nil, &Refused{p.problems}
	}
	return &Manifest{Pods: p.pods, Objects: p.objects}, nil
}

// parser collects the objects of a file and their problems.
type parser struct {
	several  bool // the file has several objects, so problems need the object's name
	objects  *Objects
	pods     []*corev1.Pod
	problems []Problem
}

// decode adds an object.
func (p *parser) decode(o object) {
	switch o.apiVersion + "/" + o.kind {
	case "v1/Pod":
		if pod := decodeObject[corev1.Pod](p, o); pod != nil {
			p.pods = append(p.pods, pod)
		}
	case "v1/" + configMapKind:
		p.configMap(o)
	case "v1/" + secretKind:
		p.secret(o)
	default:
		p.add(o, "", fmt.Sprintf("apiVersion %q, kind %q: %s", o.apiVersion, o.kind, needsKubelet))
	}
}

// add adds a problem of a field.
func (p *parser) add(o object, path, reason string) {
	if p.several {
		path = strings.TrimSuffix(strings.TrimSpace(o.kind+" "+o.name)+": "+path, ": ")
	}
	p.problems = append(p.problems, Problem{path, reason})
}

// check sets a pod's defaults and checks its fields. Two pods must not have the same name.
func (p *parser) check(pod *corev1.Pod) {
	o := object{kind: "Pod", name: pod.Name}
	problems := unsupported(pod)
	setDefaults(pod)
	c := &checker{pod: pod, objects: p.objects}
	c.all()
	for _, other := range p.pods {
		if other != pod && other.Name == pod.Name && other.Namespace == pod.Namespace {
			c.add("metadata.name", "%q is there twice", pod.Name)
		}
	}
	for _, problem := range append(problems, c.problems...) {
		p.add(o, problem.Path, problem.Reason)
	}
}
