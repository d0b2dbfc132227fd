// Package handler has the runtime handlers that pods are run with: which there are, and what the programs
// of OCI runtimes behind them can do.
//
// # Contract
//
// What a program can do it is asked, and asked again when it is another file than before. One that
// is missing, or gives no answer, is a problem of the pods that ask for it, and of nobody else. What a
// pod is run with (Runtime) is decided when the pod is planned and written down with
// it: it is needed as long as the pod exists, whatever the configuration says then. List asks no program.
package handler

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/task"
	"berth/shim/ociruntime"
)

// Config says what a runtime handler runs containers with.
type Config struct {
	Path string   // the program of an OCI runtime; empty: the built-in runtime
	Args []string // options before each of its commands
}

// Info is what is known of a runtime handler.
type Info struct {
	Name    string                   `json:"name"` // empty: of pods that name none
	Path    string                   `json:"path,omitempty"`
	Runtime *ociruntime.Capabilities `json:"runtime,omitempty"` // of the program, as it says
	Problem string                   `json:"problem,omitempty"` // why no pod can be run with it; empty: one can

	RecursiveReadOnly bool `json:"recursiveReadOnly"`
	UserNamespaces    bool `json:"userNamespaces"`
}

// Handler is one runtime handler.
type Handler struct {
	name   string
	config Config
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

// Options say which handlers there are.
type Options struct {
	BuiltIn  string            // name of the one that is libcontainer
	Programs map[string]Config // the others
	Default  string            // the one that "" means; empty: BuiltIn
	Host     *host.Facts       // what the built-in one can do, and no other can do more
	Tasks    *task.Runner
	Log      *slog.Logger
}

// Set has all handlers. It never changes.
type Set struct {
	options Options
	all     map[string]*Handler
}

// Open looks at the programs of all handlers, side by side. One that is missing is looked
// for again when a pod asks for it.
func Open(ctx context.Context, options Options) (*Set, error) {
	set := &Set{options: options, all: map[string]*Handler{}}
	var looks []func() error
	for name, config := range options.Programs {
		h := &Handler{name: name, config: config}
		set.all[name] = h
		if config.Path == "" {
			continue
		}
		looks = append(looks, func() error {
			if _, err := h.look(ctx); err != nil {
				options.Log.Warn("pods of a runtime handler can't be run", "handler", h.name, "error", err)
			}
			return nil
		})
	}
	set.all[options.BuiltIn] = &Handler{name: options.BuiltIn}
	return set, options.Tasks.Together("look at the programs of", "runtime handlers", looks...)
}

// Find finds a handler by the name that a pod asks for it by. NotFound.
func (s *Set) Find(name string) (*Handler, error) {
	h, ok := s.all[cmp.Or(name, s.options.Default, s.options.BuiltIn)]
	if !ok {
		return nil, errdefs.NotFound("runtime handler %q is not configured", name)
	}
	return h, nil
}

// List returns the runtime handlers by name, first the one of pods that name none.
// It asks no program: it tells what was found out last.
func (s *Set) List() []Info {
	all := []Info{s.info("")}
	for _, name := range slices.Sorted(maps.Keys(s.all)) {
		all = append(all, s.info(name))
	}
	return all
}

func (s *Set) info(name string) Info {
	h, err := s.Find(name)
	if err != nil { // the configuration's default exists
		return Info{Name: name, Problem: err.Error()}
	}
	info := Info{Name: name, Path: h.config.Path}
	if h.config.Path == "" {
		info.RecursiveReadOnly, info.UserNamespaces = s.options.Host.RecursiveReadOnly, s.options.Host.UserNamespaces
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
		info.RecursiveReadOnly = s.options.Host.RecursiveReadOnly && found.can.RecursiveReadOnly
		info.UserNamespaces = s.options.Host.UserNamespaces && found.can.UserNamespaces
	}
	return info
}

// look returns what the program can do, and asks it anew if it is another file than
// before. FailedPrecondition if there is none, or it gives no answer.
func (h *Handler) look(ctx context.Context) (ociruntime.Capabilities, error) {
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

// Runtime is the runtime of a pod's containers, as it is written down with the pod.
type Runtime struct {
	ociruntime.Runtime
	RecursiveReadOnly bool `json:"recursiveReadOnly,omitempty"`
	IDMappedMounts    bool `json:"idMappedMounts,omitempty"`
}

// Program is the runtime as a program, nil for libcontainer.
func (r *Runtime) Program() *ociruntime.Runtime {
	if r == nil {
		return nil
	}
	return &r.Runtime
}

// IsSandboxed tells whether containers run where the node can't see them.
func (r *Runtime) IsSandboxed() bool { return r != nil && r.Sandboxed }

// Runtime returns what a pod is to be run with, nil for libcontainer. root is where a program keeps its
// state of the pod. FailedPrecondition if it can't run the pod, or there is none.
func (h *Handler) Runtime(ctx context.Context, root string, systemdCgroup, userNamespace bool) (*Runtime, error) {
	if h.config.Path == "" {
		return nil, nil
	}
	can, err := h.look(ctx)
	if err != nil {
		return nil, err
	}
	if userNamespace && !can.UserNamespaces {
		return nil, errdefs.FailedPrecondition("runtime handler %q: %s can't run pods in user namespaces, or does not say that it can", h.name, h.config.Path)
	}
	return &Runtime{
		Runtime: ociruntime.Runtime{Path: h.config.Path, Args: h.config.Args, Root: root,
			SystemdCgroup: systemdCgroup, Sandboxed: can.Sandboxed, SubCgroups: can.SubCgroups},
		RecursiveReadOnly: can.RecursiveReadOnly, IDMappedMounts: can.UserNamespaces,
	}, nil
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

// Annotate tells a runtime that is a program how a spec belongs to its pod: kind is "sandbox" for a
// pause, else "container". Nothing is told to libcontainer, which nil stands for.
func (r *Runtime) Annotate(spec *specs.Spec, kind, podID string) {
	if r == nil {
		return
	}
	spec.Annotations = map[string]string{containerTypeAnnotation: kind, sandboxIDAnnotation: podID}
	if r.SystemdCgroup {
		spec.Annotations[crunSubgroupAnnotation] = ""
	}
}
