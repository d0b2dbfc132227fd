package state

import (
	"cmp"
	"slices"
	"time"
)

// Published is an object that has a snapshot once it is published.
type Published[Snapshot any] interface {
	Indexed
	Info() *Snapshot // nil before the publication
	Birth() Birth    // never changes
}

// Birth is the sort key of lists.
type Birth struct {
	At time.Time // recorded creation time
	ID string
}

// oldestFirst compares the births of two pods or two containers.
func oldestFirst[Snapshot any, T Published[Snapshot]](a, b T) int {
	older, younger := a.Birth(), b.Birth()
	if order := older.At.Compare(younger.At); order != 0 {
		return order
	}
	return cmp.Compare(older.ID, younger.ID)
}

// infos returns the published snapshots in the same order.
func infos[Snapshot any, T Published[Snapshot]](all []T) []*Snapshot {
	published := make([]*Snapshot, 0, len(all))
	for _, object := range all {
		if info := object.Info(); info != nil {
			published = append(published, info)
		}
	}
	return published
}

// Lists returns the published snapshots of all pods and containers.
type Lists[P Published[Pod], C Published[Container]] struct {
	pods       *Index[P]
	containers *Index[C]
	events     *Events
}

// NewLists returns the lists of these indexes, and the Events on which the owner publishes changes.
func NewLists[P Published[Pod], C Published[Container]](pods *Index[P],
	containers *Index[C]) (*Lists[P, C], *Events) {
	l := &Lists[P, C]{pods: pods, containers: containers}
	l.events = NewEvents(l.published, l.containersOf)
	return l, l.events
}

// Pod returns the pod with that ID or unique ID prefix. The error is NotFound, or InvalidArgument
// for an ambiguous prefix.
func (l *Lists[P, C]) Pod(id string) (*Pod, error) {
	p, err := l.pods.Find(id)
	if err != nil {
		return nil, err
	}
	return p.Info(), nil
}

// Pods returns all pods, oldest first.
func (l *Lists[P, C]) Pods() []*Pod {
	return infos[Pod](l.pods.Sorted(oldestFirst[Pod]))
}

// Container returns the container with that ID or unique ID prefix. The error is NotFound, or
// InvalidArgument for an ambiguous prefix.
func (l *Lists[P, C]) Container(id string) (*Container, error) {
	c, err := l.containers.Find(id)
	if err != nil {
		return nil, err
	}
	return c.Info(), nil
}

// Containers returns all containers, oldest first.
func (l *Lists[P, C]) Containers() []*Container {
	return infos[Container](l.containers.Sorted(oldestFirst[Container]))
}

// Events returns the events of all pods and containers since NewLists. One goroutine may read them.
func (l *Lists[P, C]) Events() *Queue[Event] { return l.events.queue }

// published returns the snapshot of a pod, or nil for an unknown or unpublished pod.
func (l *Lists[P, C]) published(id string) *Pod {
	p, known := l.pods.Get(id)
	if !known {
		return nil
	}
	return p.Info()
}

// containersOf returns the pod's containers, oldest first. It runs under the queue's lock, so it
// copies and sorts only the pod's own containers.
func (l *Lists[P, C]) containersOf(podID string) []*Container {
	var of []C
	for _, c := range l.containers.Snapshot() {
		if info := c.Info(); info != nil && info.PodID == podID {
			of = append(of, c)
		}
	}
	slices.SortFunc(of, oldestFirst[Container])
	return infos[Container](of)
}
