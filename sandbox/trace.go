package sandbox

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/trace"
	"berth/sandbox/history"
	"berth/sandbox/state"
)

// starts are the traces of the last pod starts.
type starts struct {
	objects objects
	history history.History
}

// StartOf returns the operations of a pod's start that this daemon has executed, oldest first. They
// are the start of the pod, pulls for its containers, and the creation and start of each
// container's newest attempt. It answers from memory.
func (s *starts) StartOf(podID string) []trace.Operation {
	p, known := s.objects.pods.Get(podID)
	if !known {
		return nil
	}
	return p.start.Operations()
}

// Starts returns summaries of the last pod starts, newest first. It includes removed pods.
func (s *starts) Starts() []history.Summary { return s.history.List() }

// Start returns the start of a pod as Starts lists it. The error is NotFound if it is not kept.
func (s *starts) Start(podID string) (history.Start, error) { return s.history.Find(podID) }

// RecordPull adds a pull to the start of the pod that needs the image. The pod may not exist yet.
func (s *starts) RecordPull(pod *runtimeapi.PodSandboxMetadata, image string, t *trace.Trace) {
	if pod.GetUid() == "" && pod.GetName() == "" {
		return // a pull that belongs to no pod
	}
	for _, p := range s.objects.pods.Snapshot() {
		if meta := p.Config.GetMetadata(); meta.GetName() == pod.GetName() && meta.GetNamespace() == pod.GetNamespace() &&
			meta.GetUid() == pod.GetUid() && meta.GetAttempt() == pod.GetAttempt() {
			p.start.AddPull(t, image)
			return
		}
	}
	s.history.AddPull(identityOf(pod), image, t)
}

// addContainer adds the start of a container to its pod's.
func (s *starts) addContainer(c *container, t *trace.Trace) {
	if p, known := s.objects.pods.Get(c.PodID); known {
		p.start.AddContainer(t, c.Config.GetMetadata().GetName(), c.Config.GetMetadata().GetAttempt())
	}
}

// historyPod returns the identity under which a pod's start is kept.
func historyPod(spec *state.PodSpec) history.Pod {
	pod := identityOf(spec.Config.GetMetadata())
	pod.ID = spec.ID
	return pod
}

func identityOf(meta *runtimeapi.PodSandboxMetadata) history.Pod {
	return history.Pod{
		Namespace: meta.GetNamespace(),
		Name:      meta.GetName(),
		UID:       meta.GetUid(),
		Attempt:   meta.GetAttempt(),
	}
}
