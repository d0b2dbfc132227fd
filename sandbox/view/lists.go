package view

import (
	"berth/internal/feed"
	"berth/internal/index"
)

// Published is an object that has a snapshot of its own as soon as it is published.
type Published[Snapshot any] interface {
	index.Object
	Info() *Snapshot // nil until then
}

// Lists are all pods and containers, as they were published.
type Lists[P Published[Pod], C Published[Container]] struct {
	pods       *index.Index[P]
	containers *index.Index[C]
	events     *Events
}

// NewLists returns the lists of what is in these, and the events that are to be told by who publishes.
func NewLists[P Published[Pod], C Published[Container]](pods *index.Index[P], containers *index.Index[C]) (*Lists[P, C], *Events) {
	l := &Lists[P, C]{pods: pods, containers: containers}
	l.events = NewEvents(l.published, l.containersOf)
	return l, l.events
}

// Pod returns the pod with that ID or unique ID prefix; NotFound, or
// InvalidArgument where the prefix fits several.
func (l *Lists[P, C]) Pod(id string) (*Pod, error) {
	p, err := l.pods.Find(id)
	if err != nil {
		return nil, err
	}
	return p.Info(), nil
}

// Pods returns all pods, oldest first.
func (l *Lists[P, C]) Pods() []*Pod {
	all := l.pods.Snapshot()
	infos := make([]*Pod, 0, len(all))
	for _, p := range all {
		if info := p.Info(); info != nil {
			infos = append(infos, info)
		}
	}
	SortPods(infos)
	return infos
}

// Container returns the container with that ID or unique ID prefix; NotFound, or
// InvalidArgument where the prefix fits several.
func (l *Lists[P, C]) Container(id string) (*Container, error) {
	c, err := l.containers.Find(id)
	if err != nil {
		return nil, err
	}
	return c.Info(), nil
}

// Containers returns all containers, oldest first.
func (l *Lists[P, C]) Containers() []*Container {
	all := l.containers.Snapshot()
	infos := make([]*Container, 0, len(all))
	for _, c := range all {
		if info := c.Info(); info != nil {
			infos = append(infos, info)
		}
	}
	SortContainers(infos)
	return infos
}

// Events subscribes to what happens to all pods and containers from now on; the
// caller closes the reader. One that falls too far behind gets feed.ErrBehind.
func (l *Lists[P, C]) Events() *feed.Reader[Event] { return l.events.Subscribe() }

// published is what was published of a pod; nil if it is unknown, or was not.
func (l *Lists[P, C]) published(id string) *Pod {
	p, known := l.pods.Get(id)
	if !known {
		return nil
	}
	return p.Info()
}

// containersOf are the pod's containers, oldest first. Events are made of it under the
// feed's lock: only the pod's own are copied and sorted.
func (l *Lists[P, C]) containersOf(podID string) []*Container {
	var of []*Container
	for _, c := range l.containers.Snapshot() {
		if info := c.Info(); info != nil && info.PodID == podID {
			of = append(of, info)
		}
	}
	SortContainers(of)
	return of
}
