package sandbox

import (
	"context"

	"berth/oci"
	"berth/sandbox/handler"
	"berth/shim/ociruntime"
)

// openHandlers needs the facts of the host to be complete.
func (m *Manager) openHandlers(ctx context.Context) (err error) {
	m.handlers, err = handler.Open(ctx, handler.Options{BuiltIn: m.cfg.Handler, Programs: m.cfg.Handlers, Default: m.cfg.DefaultHandler,
		Host: m.cfg.Host, Tasks: m.tasks, Log: m.log})
	return err
}

// Handlers returns the runtime handlers by name, first the one of pods that name none.
// It asks no program: it tells what was found out last.
func (m *Manager) Handlers() []handler.Info { return m.handlers.List() }

// planRuntime returns what a pod of that handler is to be run with, nil for libcontainer.
func (m *Manager) planRuntime(ctx context.Context, p *pod, name string) (*handler.Runtime, error) {
	h, err := m.handlers.Find(name)
	if err != nil {
		return nil, err
	}
	mappings, err := oci.UserNamespace(p.config)
	if err != nil {
		return nil, err
	}
	defer m.tasks.Begin("what the handler's program can do", "handler "+name)()
	return h.Runtime(ctx, m.dirs.OCI(p.id), m.cfg.SystemdCgroup, mappings != nil)
}

// runtime is what a pod's containers are run with, nil for libcontainer. It does not
// change once the pod is planned.
func (p *pod) runtime() *ociruntime.Runtime { return p.rec.Runtime.Program() }

// runtimeOf is the same for a container; nil also if its pod's record was lost.
func (m *Manager) runtimeOf(c *container) *ociruntime.Runtime {
	p, known := m.pods.Get(c.podID)
	if !known {
		return nil
	}
	return p.runtime()
}
