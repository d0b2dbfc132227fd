package sandbox

import (
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// kubelet takes the pod or container that was created last for the current one. So each
// is created after those before it, also where the clock was set back between them.

// podCreation returns the time of creation for a new attempt of a pod.
func (m *Manager) podCreation(metadata *runtimeapi.PodSandboxMetadata) time.Time {
	var before []time.Time
	for _, p := range m.pods.Snapshot() {
		md := p.config.GetMetadata()
		if md.GetUid() == metadata.GetUid() && md.GetName() == metadata.GetName() && md.GetNamespace() == metadata.GetNamespace() {
			before = append(before, p.rec.CreatedAt) // which never changes
		}
	}
	return after(time.Now(), before)
}

// containerCreation returns the time of creation for a new container of a pod.
func (m *Manager) containerCreation(podID string) time.Time {
	var before []time.Time
	for _, c := range m.containersOf(podID) {
		before = append(before, c.rec.CreatedAt) // which never changes
	}
	return after(time.Now(), before)
}

// after returns now, by the wall clock, or the moment after the last of those before.
func after(now time.Time, before []time.Time) time.Time {
	now = now.Round(0) // records have no monotonic reading either
	for _, t := range before {
		if !now.After(t) {
			now = t.Round(0).Add(1)
		}
	}
	return now
}
