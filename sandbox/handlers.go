package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/host"
	"berth/oci"
	"berth/shim/ociruntime"
)

// HandlerConfig says what a runtime handler runs containers with.
type HandlerConfig struct {
	Path string   // the program of an OCI runtime; empty: the built-in runtime
	Args []string // options before each of its commands
}

// HandlerInfo is what is known of a runtime handler.
type HandlerInfo struct {
	Name    string                   `json:"name"` // empty: of pods that name none
	Path    string                   `json:"path,omitempty"`
	Runtime *ociruntime.Capabilities `json:"runtime,omitempty"` // of the program, as it says
	Problem string                   `json:"problem,omitempty"` // why no pod can be run with it; empty: one can

	RecursiveReadOnly bool `json:"recursiveReadOnly"`
	UserNamespaces    bool `json:"userNamespaces"`
}

// handler is one runtime handler with a program.
type handler struct {
	name   string
	config HandlerConfig
	found  atomic.Pointer[finding] // nil: not looked at yet
}

// finding is what was found out about a program, as long as it is the same file.
type finding struct {
	file os.FileInfo // nil: there is none
	can  ociruntime.Capabilities
	err  error
}

// probeLimit is how long a program may take to tell what it can do.
const probeLimit = 20 * time.Second

// openHandlers looks at the programs of all handlers, side by side. One that is
// missing is looked for again when a pod asks for it.
func (m *Manager) openHandlers(ctx context.Context) error {
	m.handlers = map[string]*handler{}
	var looks []func() error
	for name, config := range m.cfg.Handlers {
		h := &handler{name: name, config: config}
		m.handlers[name] = h
		if config.Path == "" {
			continue
		}
		looks = append(looks, func() error {
			if _, err := h.look(ctx); err != nil {
				m.log.Warn("pods of a runtime handler can't be run", "handler", h.name, "error", err)
			}
			return nil
		})
	}
	m.handlers[m.cfg.Handler] = &handler{name: m.cfg.Handler}
	return m.tasks.Together("look at the programs of", "runtime handlers", looks...)
}

// handler finds a handler by the name that a pod asks for it by. NotFound.
func (m *Manager) handler(name string) (*handler, error) {
	h, ok := m.handlers[cmp.Or(name, m.cfg.DefaultHandler, m.cfg.Handler)]
	if !ok {
		return nil, errdefs.NotFound("runtime handler %q is not configured", name)
	}
	return h, nil
}

// look returns what the program can do, and asks it anew if it is another file than
// before. FailedPrecondition if there is none, or it gives no answer.
func (h *handler) look(ctx context.Context) (ociruntime.Capabilities, error) {
	file, err := ociruntime.Executable(h.config.Path)
	if err != nil {
		h.found.Store(&finding{err: err})
		return ociruntime.Capabilities{}, errdefs.FailedPrecondition("runtime handler %q: %w", h.name, err)
	}
	if was := h.found.Load(); was != nil && was.err == nil && sameFile(was.file, file) {
		return was.can, nil
	}
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	can, err := ociruntime.Probe(ctx, h.config.Path, h.config.Args)
	h.found.Store(&finding{file: file, can: can, err: err})
	if err != nil {
		return can, errdefs.FailedPrecondition("runtime handler %q: %w", h.name, err)
	}
	return can, nil
}

func sameFile(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// Handlers returns the runtime handlers by name, first the one of pods that name none.
// It asks no program: it tells what was found out last.
func (m *Manager) Handlers() []HandlerInfo {
	all := []HandlerInfo{m.handlerInfo("")}
	for _, name := range slices.Sorted(maps.Keys(m.handlers)) {
		all = append(all, m.handlerInfo(name))
	}
	return all
}

func (m *Manager) handlerInfo(name string) HandlerInfo {
	h, err := m.handler(name)
	if err != nil { // the configuration's default exists
		return HandlerInfo{Name: name, Problem: err.Error()}
	}
	info := HandlerInfo{Name: name, Path: h.config.Path}
	if h.config.Path == "" {
		info.RecursiveReadOnly, info.UserNamespaces = m.cfg.Host.RecursiveReadOnly, m.cfg.Host.UserNamespaces
		return info
	}
	found := h.found.Load()
	switch {
	case found == nil:
		info.Problem = "it was not looked at yet"
	case found.err != nil:
		info.Problem = found.err.Error()
	default:
		info.Runtime = &found.can
		info.RecursiveReadOnly = m.cfg.Host.RecursiveReadOnly && found.can.RecursiveReadOnly
		info.UserNamespaces = m.cfg.Host.UserNamespaces && found.can.UserNamespaces
	}
	return info
}

// podRuntime is the runtime of a pod's containers, written down with the pod: it is
// needed as long as they exist, whatever the configuration says then.
type podRuntime struct {
	ociruntime.Runtime
	RecursiveReadOnly bool `json:"recursiveReadOnly,omitempty"`
	IDMappedMounts    bool `json:"idMappedMounts,omitempty"`
}

// planRuntime returns what a pod of that handler is to be run with, nil for libcontainer.
func (m *Manager) planRuntime(ctx context.Context, p *pod, name string) (*podRuntime, error) {
	h, err := m.handler(name)
	if err != nil || h.config.Path == "" {
		return nil, err
	}
	mappings, err := oci.UserNamespace(p.config)
	if err != nil {
		return nil, err
	}
	can, err := h.look(ctx)
	if err != nil {
		return nil, err
	}
	if mappings != nil && !can.UserNamespaces {
		return nil, errdefs.FailedPrecondition("runtime handler %q: %s can't run pods in user namespaces, or does not say that it can", h.name, h.config.Path)
	}
	return &podRuntime{
		Runtime: ociruntime.Runtime{Path: h.config.Path, Args: h.config.Args, Root: m.ociRoot(p.id),
			SystemdCgroup: m.cfg.SystemdCgroup, Sandboxed: can.Sandboxed, SubCgroups: can.SubCgroups},
		RecursiveReadOnly: can.RecursiveReadOnly, IDMappedMounts: can.UserNamespaces,
	}, nil
}

// runtime is what a pod's containers are run with, nil for libcontainer. It does not
// change once the pod is planned.
func (p *pod) runtime() *ociruntime.Runtime {
	if p.rec.Runtime == nil {
		return nil
	}
	return &p.rec.Runtime.Runtime
}

// runtimeOf is the same for a container; nil also if its pod's record was lost.
func (m *Manager) runtimeOf(c *container) *ociruntime.Runtime {
	p, known := m.pods.get(c.podID)
	if !known {
		return nil
	}
	return p.runtime()
}

// hostOf is what the machine offers to a pod: less than to others, if its runtime can't use it.
func (m *Manager) hostOf(p *pod) host.Facts {
	facts := *m.cfg.Host
	facts.NoAppArmorProfile = m.appArmor.problem()
	if r := p.rec.Runtime; r != nil {
		facts.RecursiveReadOnly = facts.RecursiveReadOnly && r.RecursiveReadOnly
	}
	return facts
}

// The annotations by which runtimes with one sandbox per pod know pause from the
// containers that join its sandbox; they are containerd's. Nobody else's annotations reach a runtime.
const (
	containerTypeAnnotation = "io.kubernetes.cri.container-type"
	sandboxIDAnnotation     = "io.kubernetes.cri.sandbox-id"
	// crun would put the processes into a cgroup below systemd's scope, and not find those of
	// execs, which are beside that. Empty: as libcontainer does.
	crunSubgroupAnnotation = "run.oci.systemd.subgroup"
)

// annotate tells a runtime that is a program how a spec belongs to its pod.
func (p *pod) annotate(spec *specs.Spec, kind string) {
	if r := p.rec.Runtime; r != nil {
		spec.Annotations = map[string]string{containerTypeAnnotation: kind, sandboxIDAnnotation: p.id}
		if r.SystemdCgroup {
			spec.Annotations[crunSubgroupAnnotation] = ""
		}
	}
}

// signal sends a signal to a container's init; in a sandbox of its runtime's it is the
// runtime that does it. One that has ended is no error: its exit follows.
func (m *Manager) signal(ctx context.Context, c *container, run *running, sig unix.Signal) error {
	r := m.runtimeOf(c)
	if r == nil || !r.Sandboxed || run.hasEnded() {
		return run.signal(sig)
	}
	ctx, cancel := context.WithTimeout(ctx, killWait)
	defer cancel()
	err := r.Kill(ctx, c.id, sig)
	if err != nil && run.hasEnded() {
		return nil
	}
	return err
}

// removeRuntimeRoot removes what the runtime kept of the pod's containers, which are gone.
func (m *Manager) removeRuntimeRoot(podID string) error {
	if err := os.RemoveAll(m.ociRoot(podID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove runtime state of pod %s: %w", podID, err)
	}
	failpoint.Reach("runtime.root-removed")
	return nil
}
