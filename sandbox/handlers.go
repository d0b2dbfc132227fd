package sandbox

import (
	"context"

	"berth/sandbox/handler"
	"berth/sandbox/state"
)

// Handlers returns the runtime handlers sorted by name. The default handler comes first, with an
// empty name. It returns the results of the last probes and runs no program.
func (m *Manager) Handlers() []handler.Info { return m.handlers.List() }

// SetHandlers replaces the runtime handlers. Existing pods keep their runtimes. It runs the new
// programs to learn their features. If a program fails, only pods of its handler cannot run. Calls
// must not overlap.
func (m *Manager) SetHandlers(ctx context.Context, programs map[string]handler.Config, defaultName string) error {
	return m.handlers.Replace(ctx, programs, defaultName)
}

// planRuntime returns the runtime of a new pod with the named handler, and nil for libcontainer.
func (m *Manager) planRuntime(ctx context.Context, spec *state.PodSpec, name string) (*handler.Runtime, error) {
	h, err := m.handlers.Find(name)
	if err != nil {
		return nil, err
	}
	defer m.tasks.Begin("probe of the runtime program", "handler "+name)()
	return h.Runtime(ctx, m.node.OCI(spec.ID), m.node.SystemdCgroup, spec.Mappings != nil)
}
