package state

import (
	"maps"
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Event reports that a container or pod was created, started, stopped or deleted. It holds
// snapshots and never changes.
type Event struct {
	Type       runtimeapi.ContainerEventType
	ID         string // of the container or pod
	At         time.Time
	Pod        *Pod         // the last snapshot of a deleted pod; nil if the pod has none any more
	Containers []*Container // of the pod right after the event, oldest first
}

// ToldEvent is the last event that an earlier daemon has published of an object.
type ToldEvent struct {
	Type  runtimeapi.ContainerEventType
	PodID string
}

// Events publishes the events of all pods and containers. If an earlier daemon has published events
// of an object, the first snapshot causes only the events after those.
type Events struct {
	queue      *Queue[Event]
	told       map[string]ToldEvent // by ID
	pod        func(id string) *Pod
	containers func(podID string) []*Container
}

// NewEvents returns an Events. pod finds a pod, or nil for an unknown one. containers finds its
// containers, oldest first. Both are called under the queue's lock, so they must not block.
func NewEvents(pod func(id string) *Pod, containers func(podID string) []*Container) *Events {
	return &Events{queue: NewQueue[Event](), pod: pod, containers: containers}
}

// Continue sets the last events that an earlier daemon has published, by the object's ID. It is
// called before the first event.
func (e *Events) Continue(told map[string]ToldEvent) { e.told = told }

// none comes before the first event of an object. The types of events are in the order of its life.
const none = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT - 1

// lastOf is the last event of a container in a state.
var lastOf = map[runtimeapi.ContainerState]runtimeapi.ContainerEventType{
	runtimeapi.ContainerState_CONTAINER_CREATED: runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT,
	runtimeapi.ContainerState_CONTAINER_RUNNING: runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT,
	runtimeapi.ContainerState_CONTAINER_EXITED:  runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT,
}

// ContainerChanged publishes the events between two snapshots. before is nil for the first one.
// What an earlier daemon has published counts only for the first one: recovery may revert a start,
// and the next start has events of its own.
func (e *Events) ContainerChanged(before, after *Container) {
	last := e.toldOf(after.ID)
	if before != nil {
		last = lastOf[before.State()]
	}
	for next := last + 1; next <= lastOf[after.State()]; next++ {
		if next == runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT && after.neverRan() {
			continue
		}
		e.happened(next, after.ID, after.PodID)
	}
}

// neverRan reports whether a container has exited without a start, for example at a reboot.
func (c *Container) neverRan() bool {
	return c.State() == runtimeapi.ContainerState_CONTAINER_EXITED && c.StartedAt.IsZero()
}

// PodChanged is ContainerChanged for a pod. A pod never starts again. So it has no second stop
// event, although recovery first publishes a pod with a lost pause as ready.
func (e *Events) PodChanged(before, after *Pod) {
	last := e.toldOf(after.ID)
	if before != nil {
		last = max(last, lastOfPod(before))
	}
	for next := last + 1; next <= lastOfPod(after); next++ {
		e.happened(next, after.ID, after.ID)
	}
}

func lastOfPod(p *Pod) runtimeapi.ContainerEventType {
	if p.Ready() {
		return runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT
	}
	return runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT
}

func (e *Events) toldOf(id string) runtimeapi.ContainerEventType {
	if told, ok := e.told[id]; ok {
		return told.Type
	}
	return none
}

// Recovered publishes the end of objects that an earlier daemon has told about, and that clients do
// not see any more. It is called once, when all other objects are published.
func (e *Events) Recovered(isVisible func(id string) bool) {
	gone := slices.DeleteFunc(slices.Collect(maps.Keys(e.told)), isVisible)
	isPod := func(id string) bool { return e.told[id].PodID == id }
	containers := slices.DeleteFunc(slices.Clone(gone), isPod)
	pods := slices.DeleteFunc(gone, func(id string) bool { return !isPod(id) })
	for _, id := range slices.Concat(containers, pods) {
		told := e.told[id]
		if told.Type < runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT {
			e.happened(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, id, told.PodID)
		}
		e.happened(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, id, told.PodID)
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
		e.queue.Put(func() Event {
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
	e.queue.Put(func() Event {
		return Event{Type: kind, ID: id, At: time.Now(), Pod: e.pod(podID), Containers: e.containers(podID)}
	})
}
