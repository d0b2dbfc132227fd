package sandbox

import (
	"sync/atomic"

	"berth/sandbox/state"
)

// Names finds the names of pods and containers by ID, also of those that clients do not see yet or
// any more. It takes no lock, so that a log can use it anywhere. The zero value knows no object
// until a manager opens with it.
type Names struct{ objects atomic.Pointer[objects] }

// Of returns the names of the pod or container with that ID.
func (n *Names) Of(id string) (names state.Names, known bool) {
	all := n.objects.Load()
	if all == nil {
		return names, false
	}
	if p, ok := all.pods.Get(id); ok {
		return state.NamesOf(p.Config.GetMetadata(), nil), true
	}
	c, ok := all.containers.Get(id)
	if !ok {
		return names, false
	}
	names = state.NamesOf(nil, c.Config.GetMetadata())
	if p, ok := all.pods.Get(c.PodID); ok {
		names = state.NamesOf(p.Config.GetMetadata(), c.Config.GetMetadata())
	}
	return names, true
}
