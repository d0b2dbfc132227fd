package podyaml

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Reasons to ignore objects and fields. A warning has the word "ignored" before them.
const (
	onlyPods    = "this command runs pods and nothing else of a cluster"
	oneReplica  = "this command runs one replica"
	noSchedule  = "this command does not schedule"
	noAPI       = "this command has no API server"
	noDNS       = "there is no cluster DNS; the pod resolves names as this host does"
	runsOnce    = "the job runs once, now"
	noProcess   = "nothing restarts or probes the containers of a detached pod"
	notEnforced = "berth does not enforce it"
)

// decoders decode the supported kinds, by kind.
var decoders = map[string]struct {
	apiVersion string
	decode     func(*parser, object)
}{
	"Pod":                   {"v1", (*parser).pod},
	"ConfigMap":             {"v1", (*parser).configMap},
	"Secret":                {"v1", (*parser).secret},
	"PersistentVolumeClaim": {"v1", (*parser).claim},
	"ReplicationController": {"v1", (*parser).replicationController},
	"Deployment":            {"apps/v1", (*parser).deployment},
	"ReplicaSet":            {"apps/v1", (*parser).replicaSet},
	"StatefulSet":           {"apps/v1", (*parser).statefulSet},
	"DaemonSet":             {"apps/v1", (*parser).daemonSet},
	"Job":                   {"batch/v1", (*parser).job},
	"CronJob":               {"batch/v1", (*parser).cronJob},
}

// decode adds an object of the manifest. It ignores kinds that run nothing by themselves.
func (p *parser) decode(o object) {
	switch d, known := decoders[o.kind]; {
	case o.kind == "" || o.apiVersion == "":
		p.problems = append(p.problems, Problem{Reason: fmt.Sprintf(
			"an object needs apiVersion and kind; this has apiVersion %q, kind %q", o.apiVersion, o.kind)})
	case !known:
		p.ignored = append(p.ignored, Problem{o.String(), onlyPods})
	case o.apiVersion != d.apiVersion:
		p.problems = append(p.problems, Problem{o.String(),
			fmt.Sprintf("apiVersion %q is not supported, want %s", o.apiVersion, d.apiVersion)})
	default:
		d.decode(p, o)
	}
}

func nothingToRun(objects []object) string {
	var names []string
	for _, o := range objects {
		names = append(names, o.String())
	}
	return "nothing to run: want a Pod, Deployment, StatefulSet, DaemonSet, Job or CronJob; the manifest has " +
		strings.Join(names, ", ")
}

func (p *parser) pod(o object) {
	if pod, ok := decodeObject[corev1.Pod](p, o); ok {
		p.pods = append(p.pods, parsedPod{Workload: Workload{Kind: o.kind, Name: o.name, Pod: pod}})
	}
}

// add adds the pod of a workload with a pod template.
func (p *parser) add(o object, name string, template *corev1.PodTemplateSpec, job *Job) *corev1.Pod {
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: o.namespace, Labels: template.Labels, Annotations: template.Annotations,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: o.apiVersion, Kind: o.kind, Name: o.name}},
		},
		Spec: template.Spec,
	}
	prefix := "spec.template."
	if o.kind == "CronJob" {
		prefix = "spec.jobTemplate.spec.template."
	}
	p.pods = append(p.pods, parsedPod{Workload{Kind: o.kind, Name: o.name, Pod: pod, Job: job}, prefix})
	return pod
}

// replicated adds the one pod of a workload with replicas. It skips a workload with 0 replicas.
func (p *parser) replicated(o object, name string, replicas *int32, template *corev1.PodTemplateSpec) *corev1.Pod {
	if replicas != nil && *replicas == 0 {
		p.skipped = true
		p.ignored = append(p.ignored, Problem{o.String(), "it has 0 replicas"})
		return nil
	}
	if replicas != nil && *replicas > 1 {
		p.ignored = append(p.ignored, Problem{p.where(o.kind, o.name) + "spec.replicas", oneReplica})
	}
	return p.add(o, name, template, nil)
}

func (p *parser) deployment(o object) {
	if d, ok := decodeObject[appsv1.Deployment](p, o); ok {
		p.replicated(o, o.name, d.Spec.Replicas, &d.Spec.Template)
	}
}

func (p *parser) replicaSet(o object) {
	if s, ok := decodeObject[appsv1.ReplicaSet](p, o); ok {
		p.replicated(o, o.name, s.Spec.Replicas, &s.Spec.Template)
	}
}

func (p *parser) replicationController(o object) {
	if c, ok := decodeObject[corev1.ReplicationController](p, o); ok && c.Spec.Template != nil {
		p.replicated(o, o.name, c.Spec.Replicas, c.Spec.Template)
	}
}

func (p *parser) daemonSet(o object) {
	if s, ok := decodeObject[appsv1.DaemonSet](p, o); ok {
		p.add(o, o.name, &s.Spec.Template, nil)
	}
}

// statefulSet adds the pod with ordinal 0 and its claims, named as the StatefulSet controller names
// them.
func (p *parser) statefulSet(o object) {
	s, ok := decodeObject[appsv1.StatefulSet](p, o)
	if !ok {
		return
	}
	pod := p.replicated(o, o.name+"-0", s.Spec.Replicas, &s.Spec.Template)
	if pod == nil {
		return
	}
	for i := range s.Spec.VolumeClaimTemplates {
		name := s.Spec.VolumeClaimTemplates[i].Name
		claim := name + "-" + pod.Name
		p.objects.addClaim(o.namespace, claim)
		pod.Spec.Volumes = slices.DeleteFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}})
	}
}

func (p *parser) job(o object) {
	if j, ok := decodeObject[batchv1.Job](p, o); ok {
		p.addJob(o, &j.Spec, "spec.")
	}
}

func (p *parser) cronJob(o object) {
	if c, ok := decodeObject[batchv1.CronJob](p, o); ok {
		p.ignored = append(p.ignored, Problem{p.where(o.kind, o.name) + "spec.schedule", runsOnce})
		p.addJob(o, &c.Spec.JobTemplate.Spec, "spec.jobTemplate.spec.")
	}
}

const (
	defaultBackoffLimit = 6
	maxCompletions      = 1000
)

// addJob adds a Job. at is the path of its spec.
func (p *parser) addJob(o object, spec *batchv1.JobSpec, at string) {
	where := p.where(o.kind, o.name) + at
	for _, field := range []struct {
		name string
		set  bool
	}{
		{"podFailurePolicy", spec.PodFailurePolicy != nil}, {"successPolicy", spec.SuccessPolicy != nil},
		{"backoffLimitPerIndex", spec.BackoffLimitPerIndex != nil}, {"maxFailedIndexes", spec.MaxFailedIndexes != nil},
		{"managedBy", spec.ManagedBy != nil}, {"suspend", value(spec.Suspend)},
	} {
		if field.set {
			p.problems = append(p.problems, Problem{where + field.name, notSupported})
		}
	}
	if value(spec.CompletionMode) == batchv1.IndexedCompletion {
		p.problems = append(p.problems, Problem{where + "completionMode", "Indexed is not supported"})
	}
	job := &Job{Parallelism: 1, BackoffLimit: defaultBackoffLimit}
	set := func(name string, into *int, from *int32, least int32) {
		if from == nil {
			return
		}
		if *from < least || *from > maxCompletions {
			p.problems = append(p.problems, Problem{where + name,
				fmt.Sprintf("%d is not between %d and %d", *from, least, maxCompletions)})
		}
		*into = int(*from)
	}
	set("parallelism", &job.Parallelism, spec.Parallelism, 1)
	job.Completions = job.Parallelism // a work queue: each of its pods must succeed
	set("completions", &job.Completions, spec.Completions, 1)
	set("backoffLimit", &job.BackoffLimit, spec.BackoffLimit, 0)
	job.Deadline = time.Duration(value(spec.ActiveDeadlineSeconds)) * time.Second
	switch policy := spec.Template.Spec.RestartPolicy; policy {
	case corev1.RestartPolicyNever, corev1.RestartPolicyOnFailure:
	default:
		p.problems = append(p.problems, Problem{where + "template.spec.restartPolicy",
			fmt.Sprintf("%q is not possible in a Job, want Never or OnFailure", policy)})
	}
	if p.mode.Detached && job.Completions > 1 {
		p.ignored = append(p.ignored, Problem{where + "completions", "a detached Job runs one pod"})
	}
	p.add(o, o.name, &spec.Template, job)
}
