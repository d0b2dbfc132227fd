package state

import (
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Event reports that a container or pod was created, started, stopped or deleted. It holds
// snapshots and never changes.
type Event struct {
	Type       runtimeapi.ContainerEventType
	ID         string // of the container or pod
	At         time.Time
	Pod        *Pod         // the last snapshot of a deleted pod; nil if the container outlived its pod
	Containers []*Container // of the pod right after the event, oldest first
}

// maxUnread is the number of events kept for a slow client. If all pods of a node with 110 pods end
// at once, they cause a tenth of that number.
const maxUnread = 8192

// Events publishes the events of all pods and containers.
type Events struct {
	feed       *Feed[Event]
	pod        func(id string) *Pod
	containers func(podID string) []*Container
}

// NewEvents returns an Events. pod finds a pod, or nil for an unknown one. containers finds its
// containers, oldest first. Both are called under the feed's lock, so they must not block.
func NewEvents(pod func(id string) *Pod, containers func(podID string) []*Container) *Events {
	return &Events{feed: NewFeed[Event](maxUnread), pod: pod, containers: containers}
}

// Subscribe subscribes to future events. The caller closes the reader. A reader that falls too far
// behind gets ErrBehind.
func (e *Events) Subscribe() *FeedReader[Event] { return e.feed.Subscribe() }

// ContainerChanged publishes the event between two snapshots. before is nil for the first one.
func (e *Events) ContainerChanged(before, after *Container) {
	switch {
	case before == nil:
		e.happened(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, after.ID, after.PodID)
	case before.State() == after.State():
	case after.State() == runtimeapi.ContainerState_CONTAINER_RUNNING:
		e.happened(runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, after.ID, after.PodID)
	case after.State() == runtimeapi.ContainerState_CONTAINER_EXITED:
		e.happened(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, after.ID, after.PodID)
	}
}

// PodChanged is ContainerChanged for a pod. The first snapshot of a pod has the phase ready.
func (e *Events) PodChanged(before, after *Pod) {
	switch {
	case before == nil:
		e.happened(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, after.ID, after.ID)
		e.happened(runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, after.ID, after.ID)
	case before.Ready() && !after.Ready():
		e.happened(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, after.ID, after.ID)
	}
}

// ContainerDeleted publishes the removal of a container. last is its last snapshot, or nil if the
// container was never published.
func (e *Events) ContainerDeleted(last *Container) {
	if last != nil {
		e.happened(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, last.ID, last.PodID)
	}
}

// PodDeleted is ContainerDeleted for a pod.
func (e *Events) PodDeleted(last *Pod) {
	if last != nil {
		e.feed.Publish(func() Event {
			return Event{
				Type: runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT,
				ID:   last.ID,
				At:   time.Now(),
				Pod:  last,
			}
		})
	}
}

func (e *Events) happened(kind runtimeapi.ContainerEventType, id, podID string) {
	e.feed.Publish(func() Event {
		return Event{Type: kind, ID: id, At: time.Now(), Pod: e.pod(podID), Containers: e.containers(podID)}
	})
}
