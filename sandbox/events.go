package sandbox

import (
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/feed"
)

// Event tells that a container or a pod sandbox was created, started, has stopped
// or was deleted. It holds snapshots and is never changed.
type Event struct {
	Type       runtimeapi.ContainerEventType
	ID         string // of the container, or of the pod sandbox itself
	At         time.Time
	Pod        *PodInfo         // the last there was, if it is deleted; nil if the container had outlived it
	Containers []*ContainerInfo // of the pod, oldest first, as they were right after the event
}

// maxUnread is how many events are kept for a client that does not read them. A
// node with 110 pods, all ending at once, has a tenth of that.
const maxUnread = 8192

// Events subscribes to what happens to all pods and containers from now on; the
// caller closes the reader. One that falls too far behind gets feed.ErrBehind.
func (m *Manager) Events() *feed.Reader[Event] { return m.events.Subscribe() }

// containerChanged tells of the step from one published state to the next; the
// caller has the container's turn, so that the steps come in order.
func (m *Manager) containerChanged(before, after *ContainerInfo) {
	switch {
	case before == nil:
		m.happened(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, after.ID, after.PodID)
	case before.State == after.State:
	case after.State == runtimeapi.ContainerState_CONTAINER_RUNNING:
		m.happened(runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, after.ID, after.PodID)
	case after.State == runtimeapi.ContainerState_CONTAINER_EXITED:
		m.happened(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, after.ID, after.PodID)
	}
}

// podChanged is containerChanged for a pod: it is seen for the first time when it is
// ready.
func (m *Manager) podChanged(before, after *PodInfo) {
	switch {
	case before == nil:
		m.happened(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, after.ID, after.ID)
		m.happened(runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, after.ID, after.ID)
	case before.Ready && !after.Ready:
		m.happened(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, after.ID, after.ID)
	}
}

// containerDeleted and podDeleted tell of what was visible; the rest nobody has
// heard of.
func (m *Manager) containerDeleted(c *container) {
	if c.Visible() {
		m.happened(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, c.id, c.podID)
	}
}

func (m *Manager) podDeleted(p *pod) {
	if info := p.info.Load(); info != nil {
		m.events.Publish(func() Event {
			return Event{Type: runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, ID: p.id, At: time.Now(), Pod: info}
		})
	}
}

func (m *Manager) happened(kind runtimeapi.ContainerEventType, id, podID string) {
	m.events.Publish(func() Event {
		event := Event{Type: kind, ID: id, At: time.Now(), Containers: m.containerInfos(podID)}
		if p, known := m.pods.Get(podID); known {
			event.Pod = p.info.Load()
		}
		return event
	})
}

// containerInfos are the pod's containers, oldest first. Events are made of it under the
// feed's lock: only the pod's own are copied and sorted.
func (m *Manager) containerInfos(podID string) []*ContainerInfo {
	var of []*ContainerInfo
	for _, c := range m.containers.Snapshot() {
		if info := c.info.Load(); info != nil && c.podID == podID {
			of = append(of, info)
		}
	}
	slices.SortFunc(of, byAge)
	return of
}
