// Package handler holds the configured runtime handlers and the features of their OCI runtimes.
//
// # Contract
//
// Features are probed by running the runtime's binary, and again after the binary has changed. A
// missing or silent binary fails only the pods that use its handler. The Runtime of a pod is
// decided when the pod is planned, and recorded. The pod keeps its runtime for its whole life, even
// if the configuration changes. List runs no binary.
package handler

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/task"
	"berth/shim/ociruntime"
)

// Config is the configuration of one runtime handler.
type Config struct {
	Path string   // binary of an OCI runtime or of a shim; empty: the built-in runtime
	Args []string // global options, before the command; of a shim: none
	// Task is the path of berth-task, which calls the shim at Path. Empty: Path is an OCI runtime.
	Task    string
	Options []string // of the shim: NAME=VALUE

	WithoutHostDevices bool // privileged containers get no devices of the host
	Annotations
}

// Annotations are the names of the annotations that reach a runtime. "*" stands for any characters.
type Annotations struct {
	// The sandbox and the containers of a pod get them.
	OfPods       []string `json:"podAnnotations,omitempty"`
	OfContainers []string `json:"containerAnnotations,omitempty"`
}

func (a Annotations) equal(other Annotations) bool {
	return slices.Equal(a.OfPods, other.OfPods) && slices.Equal(a.OfContainers, other.OfContainers)
}

func (c Config) equal(other Config) bool {
	return c.Path == other.Path && c.WithoutHostDevices == other.WithoutHostDevices && c.Task == other.Task &&
		slices.Equal(c.Options, other.Options) &&
		slices.Equal(c.Args, other.Args) && c.Annotations.equal(other.Annotations)
}

// Program returns the program with the command line of an OCI runtime, and its global options.
func (c Config) Program() (path string, args []string) {
	if c.Task == "" {
		return c.Path, c.Args
	}
	args = []string{"--shim", c.Path}
	for _, option := range c.Options {
		args = append(args, "--option", option)
	}
	return c.Task, args
}

// Info describes a runtime handler.
type Info struct {
	Name    string                   `json:"name"` // empty: the default handler
	Path    string                   `json:"path,omitempty"`
	Runtime *ociruntime.Capabilities `json:"runtime,omitempty"` // features that the binary reports
	Problem string                   `json:"problem,omitempty"` // why pods of this handler cannot run; empty: they can

	RecursiveReadOnly bool `json:"recursiveReadOnly"`
	UserNamespaces    bool `json:"userNamespaces"`
	CgroupNamespaces  bool `json:"cgroupNamespaces"`
}

// Handler is one configured runtime handler.
type Handler struct {
	name   string
	config Config
	found  atomic.Pointer[probe] // nil: not probed yet
}

// probe is the result of probing a binary. It is valid until the file changes.
type probe struct {
	file os.FileInfo // nil: the binary is missing
	can  ociruntime.Capabilities
	err  error
}

// probeTimeout limits how long a binary may take to report its features.
const probeTimeout = 20 * time.Second

// Options configures the handlers.
type Options struct {
	BuiltIn  string            // name of the built-in handler, libcontainer
	Programs map[string]Config // all other handlers by name
	Default  string            // handler of pods that name no handler; empty: BuiltIn
	Host     host.Facts        // features of the node; no handler offers more
	Tasks    *task.Runner
	Log      *slog.Logger
}

// Set holds all handlers.
type Set struct {
	options  Options
	handlers atomic.Pointer[handlers]
}

// handlers are the configured handlers. They are immutable.
type handlers struct {
	all         map[string]*Handler
	defaultName string
}

// Open probes the binaries of all handlers in parallel. A missing binary is looked up again for
// each pod that uses it.
func Open(ctx context.Context, options Options) (*Set, error) {
	set := &Set{options: options}
	set.handlers.Store(&handlers{all: map[string]*Handler{}})
	return set, set.Replace(ctx, options.Programs, options.Default)
}

// Replace sets new handlers. It probes new and changed binaries in parallel. Existing pods keep
// their runtimes. Calls must not overlap.
func (s *Set) Replace(ctx context.Context, programs map[string]Config, defaultName string) error {
	next := &handlers{all: map[string]*Handler{}, defaultName: cmp.Or(defaultName, s.options.BuiltIn)}
	next.all[s.options.BuiltIn] = &Handler{name: s.options.BuiltIn}
	var probes []func() error
	for name, config := range programs {
		if old := s.handlers.Load().all[name]; old != nil && old.config.equal(config) {
			next.all[name] = old
			continue
		}
		h := &Handler{name: name, config: config}
		next.all[name] = h
		if config.Path == "" {
			continue
		}
		probes = append(probes, func() error {
			if _, err := h.probe(ctx); err != nil {
				s.options.Log.Warn("probe runtime handler: its pods cannot run", "handler", h.name, "error", err)
			}
			return nil
		})
	}
	err := s.options.Tasks.Parallel("probe", "runtime handlers", probes...)
	s.handlers.Store(next)
	return err
}

// Find returns the handler with this name. An empty name means the default handler. The error is
// NotFound.
func (s *Set) Find(name string) (*Handler, error) {
	set := s.handlers.Load()
	h, ok := set.all[cmp.Or(name, set.defaultName)]
	if !ok {
		return nil, errdefs.NotFound("runtime handler %q is not configured", name)
	}
	return h, nil
}

// List returns the runtime handlers: the default handler first, then all handlers by name. It
// reports the results of the last probes and runs no binary.
func (s *Set) List() []Info {
	all := []Info{s.info("")}
	for _, name := range slices.Sorted(maps.Keys(s.handlers.Load().all)) {
		all = append(all, s.info(name))
	}
	return all
}

func (s *Set) info(name string) Info {
	h, err := s.Find(name)
	if err != nil { // not reached, because the configured default exists
		return Info{Name: name, Problem: err.Error()}
	}
	info := Info{Name: name, Path: h.config.Path}
	if h.config.Path == "" {
		info.RecursiveReadOnly, info.UserNamespaces = s.options.Host.RecursiveReadOnly, s.options.Host.UserNamespaces
		info.CgroupNamespaces = true
		return info
	}
	found := h.found.Load()
	switch {
	case found == nil:
		info.Problem = "not probed yet"
	case found.err != nil:
		info.Problem = found.err.Error()
	default:
		info.Runtime = &found.can
		info.RecursiveReadOnly = s.options.Host.RecursiveReadOnly && found.can.RecursiveReadOnly
		info.UserNamespaces = s.options.Host.UserNamespaces && found.can.UserNamespaces
		info.CgroupNamespaces = found.can.CgroupNamespaces
	}
	return info
}

// probe returns the features of the binary. It runs the binary again after the file has changed.
// The error is FailedPrecondition if the binary is missing or does not answer.
func (h *Handler) probe(ctx context.Context) (ociruntime.Capabilities, error) {
	file, err := ociruntime.Executable(h.config.Path)
	if err != nil {
		h.found.Store(&probe{err: err})
		return ociruntime.Capabilities{}, errdefs.FailedPrecondition("runtime handler %q: %w", h.name, err)
	}
	if was := h.found.Load(); was != nil && was.err == nil && sameFile(was.file, file) {
		return was.can, nil
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	path, args := h.config.Program()
	can, err := ociruntime.Probe(ctx, path, args)
	h.found.Store(&probe{file: file, can: can, err: err})
	if err != nil {
		return can, errdefs.FailedPrecondition("runtime handler %q: %w", h.name, err)
	}
	return can, nil
}

func sameFile(a, b os.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// Runtime is the OCI runtime of a pod's containers, as recorded with the pod.
type Runtime struct {
	ociruntime.Runtime
	RecursiveReadOnly bool `json:"recursiveReadOnly,omitempty"`
	IDMappedMounts    bool `json:"idMappedMounts,omitempty"`
	CgroupNamespaces  bool `json:"cgroupNamespaces,omitempty"` // false in records of berth 0.2
	// WithoutHostDevices and Annotations are those of Config.
	WithoutHostDevices bool `json:"withoutHostDevices,omitempty"`
	Annotations
}

// Program returns the runtime to execute, nil for libcontainer.
func (r *Runtime) Program() *ociruntime.Runtime {
	if r == nil {
		return nil
	}
	return &r.Runtime
}

// IsSandboxed reports whether processes of containers are invisible to the node, as in a VM or
// gVisor.
func (r *Runtime) IsSandboxed() bool { return r != nil && r.Sandboxed }

// NeedsOverlay reports whether the root filesystem of a pause must be an overlay. A virtual machine
// could get the disk below a bind mount.
func (r *Runtime) NeedsOverlay() bool { return r != nil && r.TaskAPI }

// IsBuiltIn reports whether libcontainer makes the handler's containers.
func (h *Handler) IsBuiltIn() bool { return h.config.Path == "" }

// Runtime returns the runtime for a new pod, nil for libcontainer. root is the directory for the
// runtime's state of this pod. The error is FailedPrecondition if the binary is missing or does not
// support the pod.
func (h *Handler) Runtime(ctx context.Context, root string, systemdCgroup, userNamespace bool) (*Runtime, error) {
	if h.config.Path == "" {
		return nil, nil
	}
	can, err := h.probe(ctx)
	if err != nil {
		return nil, err
	}
	if userNamespace && !can.UserNamespaces {
		return nil, errdefs.FailedPrecondition("runtime handler %q: %s does not report support for user namespaces",
			h.name, h.config.Path)
	}
	path, args := h.config.Program()
	switch {
	case can.Measures:
		args = append(args, "--watch")
	case h.config.Task != "" && !can.Sandboxed:
		args = append(args, "--visible")
	}
	return &Runtime{
		Runtime: ociruntime.Runtime{Path: path, Args: args, Root: root,
			SystemdCgroup: systemdCgroup, Sandboxed: can.Sandboxed, Measures: can.Measures,
			TaskAPI: h.config.Task != "", SubCgroups: can.SubCgroups, Version: can.Version},
		RecursiveReadOnly: can.RecursiveReadOnly, IDMappedMounts: can.UserNamespaces, CgroupNamespaces: can.CgroupNamespaces,
		Annotations: h.config.Annotations, WithoutHostDevices: h.config.WithoutHostDevices,
	}, nil
}

// Runtimes with one sandbox per pod distinguish the pause from other containers by containerd's
// annotations. Other annotations reach a runtime only if its configuration lists them.
const (
	containerTypeAnnotation = "io.kubernetes.cri.container-type"
	sandboxIDAnnotation     = "io.kubernetes.cri.sandbox-id"
	containerNameAnnotation = "io.kubernetes.cri.container-name" // by which gVisor finds a container in a checkpoint
	// By default crun creates a cgroup below systemd's scope. Then it does not find the processes
	// of execs, which are outside of that cgroup. If the value is empty, it creates no cgroup below
	// the scope, as libcontainer.
	crunSubgroupAnnotation = "run.oci.systemd.subgroup"
)

// Annotate adds the annotations that a runtime binary gets. It takes annotations of the pod and the
// container if the handler's configuration lists them. A container's value replaces the pod's. It
// also adds the annotations by which the runtime finds the pod of a spec. container is nil for a
// pause. A nil Runtime (libcontainer) adds no annotations.
func (r *Runtime) Annotate(
	spec *specs.Spec, podID string, pod *runtimeapi.PodSandboxConfig, container *runtimeapi.ContainerConfig,
) {
	if r == nil {
		return
	}
	spec.Annotations = map[string]string{}
	pass(spec.Annotations, r.OfPods, pod.GetAnnotations())
	pass(spec.Annotations, r.OfContainers, container.GetAnnotations())
	kind, name := "sandbox", container.GetMetadata().GetName()
	if container != nil {
		kind = "container"
	}
	spec.Annotations[containerTypeAnnotation], spec.Annotations[sandboxIDAnnotation] = kind, podID
	if name != "" && r.Parent() {
		spec.Annotations[containerNameAnnotation] = name
	}
	if r.SystemdCgroup {
		spec.Annotations[crunSubgroupAnnotation] = ""
	}
}

// AnnotateSize adds the annotations from which a shim takes the size of a pod's virtual machine. A
// Runtime that is no shim needs none.
func (r *Runtime) AnnotateSize(spec *specs.Spec, resources *runtimeapi.LinuxContainerResources) {
	if r == nil || !r.TaskAPI || resources == nil {
		return
	}
	for name, value := range map[string]int64{
		"sandbox-cpu-period": resources.CpuPeriod, "sandbox-cpu-quota": resources.CpuQuota,
		"sandbox-cpu-shares": resources.CpuShares, "sandbox-memory": resources.MemoryLimitInBytes,
	} {
		spec.Annotations[ownAnnotations+name] = strconv.FormatInt(value, 10)
	}
}

// ownAnnotations begins the names by which a runtime finds the pod of a container. A request cannot
// set them.
const ownAnnotations = "io.kubernetes.cri."

// shimGroupAnnotation would put a container into the shim of another pod.
const shimGroupAnnotation = "io.containerd.runc.v2.group"

// pass adds those of the requested annotations that a configuration lists.
func pass(to map[string]string, listed []string, requested map[string]string) {
	for key, value := range requested {
		if !strings.HasPrefix(key, ownAnnotations) && key != crunSubgroupAnnotation && key != shimGroupAnnotation &&
			slices.ContainsFunc(listed, func(pattern string) bool { return matches(pattern, key) }) {
			to[key] = value
		}
	}
}

// matches reports whether text matches the pattern, in which "*" stands for any characters.
func matches(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	rest, ok := strings.CutPrefix(text, parts[0])
	if !ok || len(parts) == 1 {
		return ok && rest == ""
	}
	last := len(parts) - 1
	for _, part := range parts[1:last] {
		if _, rest, ok = strings.Cut(rest, part); !ok {
			return false
		}
	}
	return strings.HasSuffix(rest, parts[last])
}
