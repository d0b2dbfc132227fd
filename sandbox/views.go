package sandbox

import (
	"berth/internal/feed"
	"berth/sandbox/view"
)

// Pod returns the pod with that ID or unique ID prefix; NotFound, or
// InvalidArgument where the prefix fits several.
func (m *Manager) Pod(id string) (*view.Pod, error) {
	p, err := m.pods.Find(id)
	if err != nil {
		return nil, err
	}
	return p.info.Load(), nil
}

// Pods returns all pods, oldest first.
func (m *Manager) Pods() []*view.Pod {
	all := m.pods.Snapshot()
	infos := make([]*view.Pod, 0, len(all))
	for _, p := range all {
		if info := p.info.Load(); info != nil {
			infos = append(infos, info)
		}
	}
	view.SortPods(infos)
	return infos
}

// Container returns the container with that ID or unique ID prefix; NotFound, or
// InvalidArgument where the prefix fits several.
func (m *Manager) Container(id string) (*view.Container, error) {
	c, err := m.containers.Find(id)
	if err != nil {
		return nil, err
	}
	return c.info.Load(), nil
}

// Containers returns all containers, oldest first.
func (m *Manager) Containers() []*view.Container {
	all := m.containers.Snapshot()
	infos := make([]*view.Container, 0, len(all))
	for _, c := range all {
		if info := c.info.Load(); info != nil {
			infos = append(infos, info)
		}
	}
	view.SortContainers(infos)
	return infos
}

// Events subscribes to what happens to all pods and containers from now on; the
// caller closes the reader. One that falls too far behind gets feed.ErrBehind.
func (m *Manager) Events() *feed.Reader[view.Event] { return m.events.Subscribe() }

// podInfo is what was published of a pod; nil if it is unknown, or was not.
func (m *Manager) podInfo(id string) *view.Pod {
	p, known := m.pods.Get(id)
	if !known {
		return nil
	}
	return p.info.Load()
}

// containerInfos are the pod's containers, oldest first. Events are made of it under the
// feed's lock: only the pod's own are copied and sorted.
func (m *Manager) containerInfos(podID string) []*view.Container {
	var of []*view.Container
	for _, c := range m.containers.Snapshot() {
		if info := c.info.Load(); info != nil && c.podID == podID {
			of = append(of, info)
		}
	}
	view.SortContainers(of)
	return of
}
