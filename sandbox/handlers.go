package sandbox

import (
	"context"

	"berth/sandbox/handler"
	"berth/sandbox/state"
	"berth/shim/ociruntime"
)

// openHandlers needs the facts of the host to be complete.
func (m *Manager) openHandlers(ctx context.Context) (err error) {
	m.handlers, err = handler.Open(ctx, handler.Options{BuiltIn: m.cfg.Handler, Programs: m.cfg.Handlers, Default: m.cfg.DefaultHandler,
		Host: m.host, Tasks: m.tasks, Log: m.log})
	return err
}

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
func (m *Manager) runtimeOf(c *container) *ociruntime.Runtime {
	p, known := m.pods.Get(c.PodID)
	if !known {
		return nil
	}
	return p.Runtime.Program()
}
