package sandbox

import (
	"context"

	"berth/sandbox/handler"
	"berth/sandbox/state"
	"berth/shim/ociruntime"
)

// Handlers returns the runtime handlers by name, first the one of pods that name none.
// It asks no program: it tells what was found out last.
func (m *Manager) Handlers() []handler.Info { return m.handlers.List() }

// planRuntime returns what a pod of that handler is run with, nil for libcontainer.
func (m *Manager) planRuntime(ctx context.Context, spec *state.PodSpec, name string) (*handler.Runtime, error) {
	h, err := m.handlers.Find(name)
	if err != nil {
		return nil, err
	}
	defer m.tasks.Begin("what the handler's program can do", "handler "+name)()
	return h.Runtime(ctx, m.dirs.OCI(spec.ID), m.cfg.SystemdCgroup, spec.Mappings != nil)
}

// runtimeOf returns what a container is run with: nil for libcontainer, or if its pod's record was lost.
func (o objects) runtimeOf(c *container) *ociruntime.Runtime {
	p, known := o.pods.Get(c.PodID)
	if !known {
		return nil
	}
	return p.Runtime.Program()
}
