package sandbox

import (
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/sandbox/state"
)

// podCreation returns the creation time of a pod's new attempt. It is later than all earlier
// attempts.
func (o objects) podCreation(metadata *runtimeapi.PodSandboxMetadata) time.Time {
	var before []time.Time
	for _, p := range o.pods.Snapshot() {
		md := p.Config.GetMetadata()
		if md.GetUid() == metadata.GetUid() && md.GetName() == metadata.GetName() &&
			md.GetNamespace() == metadata.GetNamespace() {
			before = append(before, p.CreatedAt)
		}
	}
	return state.CreationAfter(time.Now(), before)
}

// containerCreation returns the creation time of a pod's new container. It is later than all other
// containers of the pod.
func (o objects) containerCreation(podID string) time.Time {
	var before []time.Time
	for _, c := range o.containersOf(podID) {
		before = append(before, c.CreatedAt)
	}
	return state.CreationAfter(time.Now(), before)
}
