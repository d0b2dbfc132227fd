package sandbox

import (
	"cmp"
	"slices"

	"berth/internal/trace"
)

// StartOf returns the traces of a pod's start, oldest first: the trace of the pod, and the trace of
// each container's newest attempt. It returns nil for an unknown pod, and if an earlier daemon
// started the pod.
func (m *Manager) StartOf(podID string) []trace.Operation {
	p, known := m.pods.Get(podID)
	if !known {
		return nil
	}
	var all []trace.Operation
	add := func(t *trace.Trace, name string, attempt uint32) {
		if t != nil {
			all = append(all, t.Operation(name, attempt))
		}
	}
	add(p.started, "", 0)
	newest := map[string]*container{}
	for _, c := range m.containers.Snapshot() {
		name := c.Config.GetMetadata().GetName()
		if c.PodID == podID && (newest[name] == nil ||
			newest[name].Config.GetMetadata().GetAttempt() <= c.Config.GetMetadata().GetAttempt()) {
			newest[name] = c
		}
	}
	for name, c := range newest {
		add(c.created, name, c.Config.GetMetadata().GetAttempt())
		add(c.started.Load(), name, c.Config.GetMetadata().GetAttempt())
	}
	slices.SortFunc(all, func(a, b trace.Operation) int { return cmp.Compare(a.Monotonic, b.Monotonic) })
	return all
}
