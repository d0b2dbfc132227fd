package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/sandbox/state"
)

// nriCalls calls NRI plugins with pods and containers at the steps of their lifecycle.
type nriCalls struct {
	caller  pluginCaller
	control *control
}

func newNRICalls(cfg Config, k *control) nriCalls {
	plugins := cfg.Plugins
	if plugins == nil {
		plugins = noPlugins{}
	}
	return nriCalls{
		caller:  pluginCaller{Plugins: plugins, Target: pluginRuntime{k}, Tasks: k.tasks, Log: cfg.Log},
		control: k,
	}
}

// PresentPod calls plugins with a pod that is about to be published (see pluginCaller).
func (n nriCalls) PresentPod(ctx context.Context, p lockedPod) (release func(), err error) {
	ctx, span := trace.Nest(ctx, "plugins")
	defer span.End()
	release, p.Presented, err = n.caller.PresentPod(ctx, func() *nri.Pod { return pluginPod(p.snapshot()) })
	return release, err
}

// NotifyPod notifies plugins of a pod's event.
func (n nriCalls) NotifyPod(ctx context.Context, event nri.PodEvent, p lockedPod) {
	n.caller.NotifyPod(ctx, event, func() *nri.Pod {
		info := p.info.Load()
		if info == nil { // presented, but never published
			info = p.snapshot()
		}
		return pluginPod(info)
	})
}

// PresentContainer lets plugins adjust a container before it is published. runtimeSpec has none of
// the adjustments. others are the changes of other containers that plugins request (see
// pluginCaller).
func (n nriCalls) PresentContainer(
	ctx context.Context, p *pod, c lockedContainer, runtimeSpec *specs.Spec,
) (release func(), others []nri.Update, err error) {
	ctx, span := trace.Nest(ctx, "plugins")
	defer span.End()
	var changes *pluginChanges
	release, c.Presented, changes, err = n.caller.PresentContainer(ctx, func() (*nri.Pod, *nri.Container, error) {
		described := pluginContainer(c.snapshot(), n.control.node.Host)
		described.RuntimeSpec = runtimeSpec
		return pluginPod(p.info.Load()), described, nil
	})
	if err != nil || changes == nil {
		return release, nil, err
	}
	if c.Adjustment = changes.Adjustment; c.Adjustment != nil {
		c.planned = nil
	}
	if !changes.Own.Empty() {
		err = n.control.setResources(c, mergeResources(c.Resources, changes.Own.Resources), changes.Own.Limits)
	}
	return release, changes.Others, err
}

// RequestStart asks plugins for permission to start a container.
func (n nriCalls) RequestStart(ctx context.Context, c lockedContainer) error {
	ctx, span := trace.Nest(ctx, "plugins")
	defer span.End()
	return n.caller.RequestStart(ctx, n.describer(c))
}

// NotifyContainer notifies plugins of a container's event.
func (n nriCalls) NotifyContainer(ctx context.Context, event nri.ContainerEvent, c lockedContainer) {
	defer trace.Begin(ctx, "notify plugins").End()
	n.caller.NotifyContainer(ctx, event, c.ID, n.describer(c), func() {
		if event == nri.ContainerStopped {
			close(*c.stopNotified.Swap(nil))
		}
	})
}

// describer returns a function that describes a container to plugins.
func (n nriCalls) describer(c lockedContainer) containerDescriber {
	return func() (*nri.Pod, *nri.Container, error) {
		p, err := n.control.objects.pods.Find(c.PodID)
		if err != nil {
			return nil, nil, err
		}
		info := c.info.Load()
		if info == nil { // presented, but never published
			info = c.snapshot()
		}
		return pluginPod(p.info.Load()), pluginContainer(info, n.control.node.Host), nil
	}
}

func pluginPod(p *state.Pod) *nri.Pod {
	return &nri.Pod{
		ID:          p.ID,
		Handler:     p.Handler,
		Config:      p.ShownConfig(),
		IPs:         p.IPs,
		PID:         p.PausePID,
		NetNS:       p.NetNS,
		CgroupsPath: p.CgroupsPath,
	}
}

// pluginContainer describes a container to plugins. It opens no file.
func pluginContainer(c *state.Container, facts host.Facts) *nri.Container {
	exit := c.Ended()
	described := &nri.Container{ID: c.ID, PodID: c.PodID, ImageID: c.Image.ID, Config: c.Config, State: c.State(),
		CreatedAt: c.CreatedAt, StartedAt: c.StartedAt, FinishedAt: exit.FinishedAt, ExitCode: exit.Code,
		Reason: exit.Reason, Message: exit.Message, PID: c.PID, Resources: c.Resources, Adjustment: c.Adjustment}
	described.RuntimeSpec = &specs.Spec{Process: c.Process}
	if c.Described == nil { // recorded by an earlier version, or not created
		return described
	}
	linux := *c.Described.Linux
	// Show the limits in force, not the limits of the container's creation.
	if inForce, err := kernelLimits(c.Resources, c.Limits, facts); err == nil {
		inForce.Devices = linux.Resources.Devices
		linux.Resources = inForce
	}
	described.RuntimeSpec.Mounts, described.RuntimeSpec.Hooks = c.Described.Mounts, c.Described.Hooks
	described.RuntimeSpec.Linux = &linux
	return described
}

// Plugins is implemented by *nri.Plugins, which documents the methods. While Hold returns false,
// only Start, Close and Hold may be called.
type Plugins interface {
	Start(context.Context, nri.Runtime) error
	Close()
	Hold() (release func(), active bool)
	Pod(ctx context.Context, event nri.PodEvent, pod *nri.Pod) error
	Container(ctx context.Context, event nri.ContainerEvent, pod *nri.Pod, c *nri.Container) ([]nri.Update, error)
	CreateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container) (*nri.Adjustment, nri.Update, []nri.Update, error)
	UpdateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container,
		wanted *runtimeapi.LinuxContainerResources) (nri.Update, []nri.Update, error)
}

// noPlugins implements Plugins when NRI is disabled.
type noPlugins struct{ Plugins }

func (noPlugins) Start(context.Context, nri.Runtime) error { return nil }
func (noPlugins) Close()                                   {}
func (noPlugins) Hold() (release func(), active bool)      { return func() {}, false }

// pluginTarget gives plugins access to pods and containers.
type pluginTarget interface {
	// Objects returns all pods, and all containers whose exit has not been reported to plugins. It
	// is called during a hold.
	Objects() ([]*nri.Pod, []*nri.Container)
	// Update changes a container's limits. It waits for the container's lock until ctx ends. It
	// does not call plugins again.
	Update(ctx context.Context, u nri.Update) error
	// CheckContainer returns NotFound unless the container exists.
	CheckContainer(id string) error
	// StopContainer stops a container. It takes the container's lock.
	StopContainer(ctx context.Context, id string, timeout time.Duration) error
}

// podDescriber and containerDescriber describe objects to plugins. They are called only if plugins
// exist, and open no file.
type (
	podDescriber       func() *nri.Pod
	containerDescriber func() (*nri.Pod, *nri.Container, error)
)

// pluginCaller calls NRI plugins at the steps of a pod's and container's lifecycle, and applies the
// updates that they request.
//
// The caller holds the lock of the pod or container of a call, so plugins see its events in order.
// Each call prevents registrations of new plugins (Plugins.Hold). During a hold no code may take
// the lock of a pod or container, or open a file that a user named, except for describeChanged,
// which has a limit. The request timeout limits each plugin's answer. Updates of other containers
// are applied after the hold, when the caller's locks are released. A plugin that registers gets
// the present state of all objects.
type pluginCaller struct {
	Plugins Plugins
	Target  pluginTarget
	Tasks   *task.Runner
	Log     *slog.Logger
}

// PresentPod calls plugins with a pod that is about to be published. New plugins cannot register
// until release is called. release is never nil. presented reports that plugins were called.
func (s pluginCaller) PresentPod(ctx context.Context, pod podDescriber) (release func(), presented bool, err error) {
	release, active := s.Plugins.Hold()
	if !active {
		return release, false, nil
	}
	p := pod()
	if err := s.Plugins.Pod(ctx, nri.RunPod, p); err != nil {
		return release, true, fmt.Errorf("run pod %s: %w", p.ID, err)
	}
	return release, true, nil
}

// NotifyPod reports an event of a pod to plugins. Their answers do not affect the pod.
func (s pluginCaller) NotifyPod(ctx context.Context, event nri.PodEvent, pod podDescriber) {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return
	}
	p := pod()
	if err := s.Plugins.Pod(ctx, event, p); err != nil {
		s.Log.Warn("NRI plugin failed", "pod", p.ID, "event", event, "error", err)
	}
}

// RequestPodUpdate asks plugins for permission to update a pod.
func (s pluginCaller) RequestPodUpdate(ctx context.Context, pod podDescriber) error {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return nil
	}
	p := pod()
	if err := s.Plugins.Pod(ctx, nri.UpdatePod, p); err != nil {
		return fmt.Errorf("update pod sandbox %s: %w", p.ID, err)
	}
	return nil
}

// pluginChanges are the changes that plugins request when a container is created.
type pluginChanges struct {
	Adjustment *nri.Adjustment
	Own        nri.Update   // of the new container's resources
	Others     []nri.Update // to apply after release: a lock holder may wait for a registration, which waits for release
}

// PresentContainer lets plugins change a container that is about to be published. New plugins
// cannot register until release is called. release is never nil. changes is nil if there are no
// plugins.
func (s pluginCaller) PresentContainer(ctx context.Context, c containerDescriber) (
	release func(), presented bool, changes *pluginChanges, err error) {
	release, active := s.Plugins.Hold()
	if !active {
		return release, false, nil, nil
	}
	pod, container, err := c()
	if err != nil {
		return release, true, nil, err
	}
	changes = &pluginChanges{}
	changes.Adjustment, changes.Own, changes.Others, err = s.Plugins.CreateContainer(ctx, pod, container)
	if err != nil {
		return release, true, nil, err
	}
	return release, true, changes, nil
}

// RequestStart asks plugins for permission to start a container.
func (s pluginCaller) RequestStart(ctx context.Context, c containerDescriber) error {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return nil
	}
	pod, container, err := c()
	if err != nil {
		return err
	}
	_, err = s.Plugins.Container(ctx, nri.StartContainer, pod, container)
	return err
}

// RequestUpdate calls plugins with the update of a container. It returns the update to apply and
// the updates of other containers.
func (s pluginCaller) RequestUpdate(ctx context.Context, id string, wanted *runtimeapi.LinuxContainerResources,
	c containerDescriber) (nri.Update, []nri.Update, error) {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return nri.Update{ContainerID: id, Resources: wanted}, nil, nil
	}
	pod, container, err := c()
	if err != nil {
		return nri.Update{}, nil, err
	}
	return s.Plugins.UpdateContainer(ctx, pod, container, wanted)
}

// NotifyContainer reports an event of a container to plugins. Their answers do not affect the
// container. Updates of other containers are applied in the background. It calls done before the
// hold ends, even if there are no plugins.
func (s pluginCaller) NotifyContainer(
	ctx context.Context, event nri.ContainerEvent, id string, c containerDescriber, done func(),
) {
	release, active := s.Plugins.Hold()
	defer release()
	defer done()
	if !active {
		return
	}
	pod, container, err := c()
	var updates []nri.Update
	if err == nil {
		updates, err = s.Plugins.Container(ctx, event, pod, container)
	}
	if err != nil {
		s.Log.Warn("NRI plugin failed", "container", id, "event", event, "error", err)
	}
	s.UpdateLater(updates)
}

// pluginRuntime implements pluginTarget.
type pluginRuntime struct{ *control }

// Objects implements pluginTarget.
func (r pluginRuntime) Objects() ([]*nri.Pod, []*nri.Container) {
	var pods []*nri.Pod
	for _, p := range r.objects.pods.Snapshot() {
		if info := p.info.Load(); info != nil {
			pods = append(pods, pluginPod(info))
		}
	}
	var containers []*nri.Container
	for _, c := range r.objects.containers.Snapshot() {
		if info := c.info.Load(); info != nil && (info.State() != runtimeapi.ContainerState_CONTAINER_EXITED ||
			c.stopNotified.Load() != nil) {
			containers = append(containers, pluginContainer(info, r.node.Host))
		}
	}
	return pods, containers
}

// CheckContainer implements pluginTarget.
func (r pluginRuntime) CheckContainer(id string) error {
	_, err := r.visible(id)
	return err
}

// visible finds a container by its full ID, if plugins can have seen it.
func (r pluginRuntime) visible(id string) (*container, error) {
	c, known := r.objects.containers.Get(id)
	if !known || !c.Visible() {
		return nil, errdefs.NotFound("container %q does not exist", id)
	}
	return c, nil
}

// Update implements pluginTarget.
func (r pluginRuntime) Update(ctx context.Context, u nri.Update) error {
	c, err := r.visible(u.ContainerID)
	if err != nil {
		return err
	}
	return r.lockContainer(ctx, c, "update for a plugin", func(c lockedContainer) error {
		if err := checkUpdatable(c); err != nil {
			return err
		}
		return r.changeResources(ctx, c, u)
	})
}
