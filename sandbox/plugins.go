package sandbox

import (
	"context"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/trace"
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

// PresentContainer lets plugins adjust a container before it is published. spec is the runtime-spec
// before the adjustments. others are the changes that plugins request of other containers (see
// pluginCaller).
func (n nriCalls) PresentContainer(
	ctx context.Context, p *pod, c lockedContainer, spec *specs.Spec,
) (release func(), others []nri.Update, err error) {
	ctx, span := trace.Nest(ctx, "plugins")
	defer span.End()
	var changes *pluginChanges
	release, c.Presented, changes, err = n.caller.PresentContainer(ctx, func() (*nri.Pod, *nri.Container, error) {
		described := pluginContainer(c.snapshot(), n.control.node.Host)
		described.Spec = spec
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
		return r.changeResources(c, u)
	})
}
