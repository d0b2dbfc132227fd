// Package podyaml converts Kubernetes manifests to CRI requests, as controllers and kubelet do
// without an API server. It is pure: callers pass facts about the host and the pod's files.
//
// # Contract
//
// Parse accepts a manifest only if every field of its pods is supported or can be ignored. It lists
// all unsupported fields by path, and groups the ignored ones in warnings. The lists of supported
// fields (honoured) and ignored fields (ignorable) are explicit, so Parse refuses a field of a
// later Kubernetes version instead of ignoring it.
//
// Defaults are those of the Kubernetes API server (pkg/apis/core/v1/defaults.go), with two
// exceptions for lack of a cluster: dnsPolicy is Default, and an unset seccompProfile is
// RuntimeDefault, as with kubelet's --seccomp-default.
package podyaml

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// Mode describes how the caller runs a manifest.
type Mode struct {
	// Detached means that no process stays with the running pods, so nothing restarts or probes
	// their containers. Parse warns of fields that need that.
	Detached bool
	// Strict means that Parse refuses what it would otherwise ignore with a warning.
	Strict bool
}

// Manifest is the content of a parsed file.
type Manifest struct {
	Workloads []Workload // in the order of the file; at least one
	Objects   *Objects
	Warnings  []string // one for each reason to ignore fields or objects
}

// Workload is an object that runs pods.
type Workload struct {
	Kind, Name string      // of the object, for example Deployment
	Pod        *corev1.Pod // its only pod, or the template of a Job's pods
	Job        *Job        // nil for workloads other than Job and CronJob
}

// Job has the rules for completing a Job.
type Job struct {
	Completions  int           // number of pods that must succeed
	Parallelism  int           // number of pods that run at the same time
	BackoffLimit int           // number of failures before the Job fails
	Deadline     time.Duration // limit of the Job's run time; 0: none
}

// Parse decodes a manifest of YAML or JSON documents, sets defaults, and checks that every field of
// its pods is supported. The error is *Refused unless the text is not YAML.
func Parse(text []byte, mode Mode) (*Manifest, error) {
	objects, err := readObjects(text)
	if err != nil {
		return nil, err
	}
	p := &parser{mode: mode, several: len(objects) > 1, objects: newObjects()}
	for _, o := range objects {
		p.decode(o)
	}
	if len(p.pods) == 0 && len(p.problems) == 0 && !p.skipped {
		p.problems = append(p.problems, Problem{Reason: nothingToRun(objects)})
	}
	p.checkNames()
	for i := range p.pods {
		p.check(&p.pods[i])
	}
	if mode.Strict {
		p.problems = append(p.problems, p.ignored...)
	}
	if len(p.problems) > 0 {
		return nil, &Refused{p.problems}
	}
	m := &Manifest{Objects: p.objects, Warnings: warnings(p.ignored)}
	for _, pod := range p.pods {
		m.Workloads = append(m.Workloads, pod.Workload)
	}
	return m, nil
}

// parser collects the objects of a manifest, and the problems of all of them.
type parser struct {
	mode     Mode
	several  bool // the manifest has several objects, so problems need the object's name
	skipped  bool // a workload has 0 replicas
	objects  *Objects
	pods     []parsedPod
	problems []Problem
	ignored  []Problem
}

// parsedPod is a workload with the place of its pod in the manifest.
type parsedPod struct {
	Workload
	prefix string // path of the pod template: "", or "spec.template."
}

// where returns the text before the path of a field in a problem.
func (p *parser) where(kind, name string) string {
	if !p.several {
		return ""
	}
	return kind + " " + name + ": "
}

// check sets a pod's defaults and checks its fields.
func (p *parser) check(w *parsedPod) {
	pod := w.Pod
	ignored := removeIgnored(pod)
	problems, more := unsupported(pod)
	ignored = append(ignored, more...)
	if p.mode.Detached {
		ignored = append(ignored, needsProcess(pod)...)
	}
	setDefaults(pod)
	c := &checker{pod: pod, objects: p.objects}
	c.all()
	for _, problem := range append(problems, c.problems...) {
		problem.Path = p.where(w.Kind, w.Name) + w.fullPath(problem.Path)
		p.problems = append(p.problems, problem)
	}
	for _, problem := range append(ignored, c.ignored...) {
		problem.Path = w.fullPath(problem.Path)
		p.ignored = append(p.ignored, problem)
	}
}

// fullPath returns the path of a pod's field in the workload.
func (w *parsedPod) fullPath(path string) string {
	if strings.HasPrefix(path, "spec") {
		return w.prefix + path
	}
	return path
}

// checkNames refuses several workloads whose pods have the same name.
func (p *parser) checkNames() {
	seen := map[string]string{}
	for _, w := range p.pods {
		key := w.Pod.Namespace + "/" + w.Pod.Name
		if other, twice := seen[key]; twice {
			p.problems = append(p.problems, Problem{w.Kind + " " + w.Name, "its pod has the same name as that of " + other})
		}
		seen[key] = w.Kind + " " + w.Name
	}
}

// warnings groups ignored fields by their reasons.
func warnings(ignored []Problem) []string {
	var reasons []string
	paths := map[string][]string{}
	for _, p := range ignored {
		if paths[p.Reason] == nil {
			reasons = append(reasons, p.Reason)
		}
		if !slices.Contains(paths[p.Reason], p.Path) {
			paths[p.Reason] = append(paths[p.Reason], p.Path)
		}
	}
	out := make([]string, len(reasons))
	for i, reason := range reasons {
		out[i] = strings.Join(paths[reason], ", ") + ": ignored: " + reason
	}
	return out
}

// refuse returns a Refused with one problem.
func refuse(path, format string, args ...any) *Refused {
	return &Refused{[]Problem{{path, fmt.Sprintf(format, args...)}}}
}
