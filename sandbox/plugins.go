package sandbox

import (
	"context"
	"fmt"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/sandbox/limits"
)

// Plugins see pods and containers and change them; *nri.Plugins is the real one, and has the
// documentation. Nothing but Start, Close and Hold is called while Hold says that there are none.
//
// They are called with the turn of the object that the call is about, so that they see what happens to it
// in its order, and under a Hold, which is a lock: who has one takes no turn and looks at no file that a user named.
// How long each plugin may take is bounded by the request timeout.
type Plugins interface {
	Start(context.Context, nri.Runtime) error
	Close()
	Hold() (release func(), active bool)
	Pod(ctx context.Context, event nri.PodEvent, pod *nri.Pod) error
	Container(ctx context.Context, event nri.ContainerEvent, pod *nri.Pod, c *nri.Container) ([]nri.Update, error)
	CreateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container) (*nri.Adjustment, nri.Update, []nri.Update, error)
	UpdateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container, wanted *runtimeapi.LinuxContainerResources) (nri.Update, []nri.Update, error)
}

// noPlugins is what a manager has where NRI is off.
type noPlugins struct{ Plugins }

func (noPlugins) Start(context.Context, nri.Runtime) error { return nil }
func (noPlugins) Close()                                   {}
func (noPlugins) Hold() (release func(), active bool)      { return func() {}, false }

// evictionGrace is how long a container that a plugin evicts has to end by itself: what Kubernetes gives pods that say nothing.
const evictionGrace = 30 * time.Second

// pluginUpdateLimit is how long an update that a plugin asked for waits for its container's turn.
const pluginUpdateLimit = 10 * time.Second

// presentPod asks the plugins about a pod that is about to be published. No plugin is told of the
// state of things until release is called, which is never nil. It needs the pod's turn.
func (m *Manager) presentPod(ctx context.Context, p *pod) (release func(), err error) {
	release, active := m.plugins.Hold()
	if !active {
		return release, nil
	}
	p.presented = true
	if err := m.plugins.Pod(ctx, nri.RunPod, m.podForPlugins(p, podInfo(p))); err != nil {
		return release, fmt.Errorf("run pod %s: %w", p.id, err)
	}
	return release, nil
}

// tellOfPod tells plugins what happened to a pod. What they answer changes nothing about it.
func (m *Manager) tellOfPod(ctx context.Context, event nri.PodEvent, p *pod) {
	release, active := m.plugins.Hold()
	defer release()
	if !active {
		return
	}
	info := p.info.Load()
	if info == nil { // it was presented and then came to nothing
		info = podInfo(p)
	}
	if err := m.plugins.Pod(ctx, event, m.podForPlugins(p, info)); err != nil {
		m.log.Warn("an NRI plugin failed", "pod", p.id, "event", event, "error", err)
	}
}

// presentContainer lets the plugins change a container that is about to be published and has this spec so far.
// others is what they want changed of others, once release was called: who has the turn of one of these may be
// waiting for a registration, and that for release. No plugin is told of the state of things until then. release is
// never nil. It needs the container's turn.
func (m *Manager) presentContainer(ctx context.Context, p *pod, c *container, spec *specs.Spec) (release func(), others []nri.Update, err error) {
	release, active := m.plugins.Hold()
	if !active {
		return release, nil, nil
	}
	c.presented = true
	described := m.containerForPlugins(c, containerInfo(c))
	described.Spec = spec
	adjustment, own, others, err := m.plugins.CreateContainer(ctx, m.podForPlugins(p, p.info.Load()), described)
	if err != nil {
		return release, nil, err
	}
	c.rec.Adjustment = adjustment
	if !own.Empty() {
		err = m.setResources(c, limits.Merge(c.resources, own.Resources), own.Limits)
	}
	return release, others, err
}

// updateWith makes the updates of others that belong to the creation of a container. The first that fails, and may
// not, fails the creation.
func (m *Manager) updateWith(ctx context.Context, others []nri.Update) error {
	for _, u := range others {
		err := m.updateForPlugin(ctx, u)
		if err != nil && !u.IgnoreFailure {
			return fmt.Errorf("update container %s for an NRI plugin: %w", u.ContainerID, err)
		}
		if err != nil {
			m.log.Warn("update for an NRI plugin", "container", u.ContainerID, "error", err)
		}
	}
	return nil
}

// askToStart asks the plugins about a container that is about to be started. It needs the container's turn.
func (m *Manager) askToStart(ctx context.Context, c *container) error {
	release, active := m.plugins.Hold()
	defer release()
	if !active {
		return nil
	}
	pod, container, err := m.forPlugins(c)
	if err != nil {
		return err
	}
	_, err = m.plugins.Container(ctx, nri.StartContainer, pod, container)
	return err
}

// askToUpdate asks the plugins about an update of a container, and returns the update to be made and
// what is to be done to others. It needs the container's turn.
func (m *Manager) askToUpdate(ctx context.Context, c *container, wanted *runtimeapi.LinuxContainerResources) (nri.Update, []nri.Update, error) {
	release, active := m.plugins.Hold()
	defer release()
	if !active {
		return nri.Update{ContainerID: c.id, Resources: wanted}, nil, nil
	}
	pod, container, err := m.forPlugins(c)
	if err != nil {
		return nri.Update{}, nil, err
	}
	return m.plugins.UpdateContainer(ctx, pod, container, wanted)
}

// tellOfContainer tells plugins what happened to a container. What they answer changes nothing
// about it; others that they want updated are updated afterwards. It needs the container's turn.
func (m *Manager) tellOfContainer(ctx context.Context, event nri.ContainerEvent, c *container) {
	release, active := m.plugins.Hold()
	defer release()
	if event == nri.ContainerStopped {
		defer func() { close(*c.stopUntold.Swap(nil)) }()
	}
	if !active {
		return
	}
	pod, container, err := m.forPlugins(c)
	var updates []nri.Update
	if err == nil {
		updates, err = m.plugins.Container(ctx, event, pod, container)
	}
	if err != nil {
		m.log.Warn("an NRI plugin failed", "container", c.id, "event", event, "error", err)
	}
	m.updateLater(updates)
}

// updateLater updates containers for a plugin when the caller has passed on its turn: whose turn the updates
// need may wait for the caller's.
func (m *Manager) updateLater(updates []nri.Update) {
	if len(updates) == 0 {
		return
	}
	m.tasks.Operations.Spawn(func() {
		for _, u := range updates {
			err := m.tasks.Guard("update", "container "+u.ContainerID, func() error {
				return m.updateForPlugin(m.tasks.Operations.Context(), u)
			})
			if err != nil {
				m.log.Warn("update for an NRI plugin", "container", u.ContainerID, "error", err)
			}
		}
	}) // else the daemon is ending: plugins are told of everything anew by the next one
}

// updateForPlugin changes a container's limits without asking plugins about it again.
func (m *Manager) updateForPlugin(ctx context.Context, u nri.Update) error {
	c, known := m.containers.Get(u.ContainerID)
	if !known || !c.Visible() {
		return errdefs.NotFound("container %q does not exist", u.ContainerID)
	}
	if u.Evict {
		return m.evictLater(c, u.Reason)
	}
	ctx, cancel := context.WithTimeout(ctx, pluginUpdateLimit)
	defer cancel()
	return m.tasks.WithTurn(ctx, c.turn, "update for a plugin", c.String(), func() error {
		if err := checkUpdatable(c); err != nil {
			return err
		}
		return m.changeResources(c, u)
	})
}

// evictLater stops a container for a plugin. Nobody waits for that: it takes the turn that the caller may have, and as long
// as the container wants.
func (m *Manager) evictLater(c *container, reason string) error {
	m.log.Info("an NRI plugin evicts a container", "container", c.id, "reason", reason)
	spawned := m.tasks.Operations.Spawn(func() {
		if err := m.StopContainer(m.tasks.Operations.Context(), c.id, evictionGrace); err != nil {
			m.log.Warn("evict for an NRI plugin", "container", c.id, "error", err)
		}
	})
	if !spawned {
		return errdefs.Unavailable("evict container %s: berth is stopping", c.id)
	}
	return nil
}

// managerForPlugins is the manager as plugins see it.
type managerForPlugins struct{ m *Manager }

// Objects implements nri.Runtime: all pods, and the containers whose end plugins have not been told of.
func (r managerForPlugins) Objects() ([]*nri.Pod, []*nri.Container) {
	var pods []*nri.Pod
	for _, p := range r.m.pods.Snapshot() {
		if info := p.info.Load(); info != nil {
			pods = append(pods, r.m.podForPlugins(p, info))
		}
	}
	var containers []*nri.Container
	for _, c := range r.m.containers.Snapshot() {
		if info := c.info.Load(); info != nil && (info.State != runtimeapi.ContainerState_CONTAINER_EXITED || c.stopUntold.Load() != nil) {
			containers = append(containers, r.m.containerForPlugins(c, info))
		}
	}
	return pods, containers
}

// Update implements nri.Runtime. An update that has its turn when ctx ends is waited for: the plugin is told what became of it.
func (r managerForPlugins) Update(ctx context.Context, u nri.Update) error {
	return r.m.tasks.Detach(context.WithoutCancel(ctx), pluginUpdateLimit, "update for a plugin", "container "+u.ContainerID,
		func(operation context.Context) error {
			turn, cancel := context.WithCancel(operation)
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			return r.m.updateForPlugin(turn, u)
		})
}

func (m *Manager) forPlugins(c *container) (*nri.Pod, *nri.Container, error) {
	p, err := m.pods.Find(c.podID)
	if err != nil {
		return nil, nil, err
	}
	info := c.info.Load()
	if info == nil { // it was presented and then came to nothing
		info = containerInfo(c)
	}
	return m.podForPlugins(p, p.info.Load()), m.containerForPlugins(c, info), nil
}

func (m *Manager) podForPlugins(p *pod, info *PodInfo) *nri.Pod {
	return &nri.Pod{ID: p.id, Handler: info.Handler, Config: info.Config, IPs: info.IPs, PID: info.PausePID, NetNS: info.NetNS, CgroupsPath: p.rec.CgroupsPath}
}

// awaitTold waits until plugins were told of a published exit.
func (m *Manager) awaitTold(ctx context.Context, c *container) error {
	told := c.stopUntold.Load()
	if told == nil {
		return nil
	}
	defer m.tasks.Begin("plugins to be told of the exit", c.String())()
	select {
	case <-*told:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("tell plugins of the exit of container %s: %w", c.id, ctx.Err())
	}
}

// containerForPlugins describes a container. It looks at no file.
func (m *Manager) containerForPlugins(c *container, info *ContainerInfo) *nri.Container {
	described := &nri.Container{ID: c.id, PodID: c.podID, ImageID: info.ImageID, Config: c.config, State: info.State,
		CreatedAt: info.CreatedAt, StartedAt: info.StartedAt, FinishedAt: info.FinishedAt, ExitCode: info.ExitCode,
		Reason: info.Reason, Message: info.Message, PID: info.PID, Resources: info.Resources, Adjustment: c.rec.Adjustment}
	described.Spec = &specs.Spec{Process: info.process}
	if info.described == nil { // its record is of an earlier version, or it came to nothing
		return described
	}
	linux := *info.described.Linux
	if inForce, err := limits.Kernel(info.Resources, info.limits, *m.cfg.Host); err == nil { // else it would have those of its creation
		inForce.Devices = linux.Resources.Devices
		linux.Resources = inForce
	}
	described.Spec.Mounts, described.Spec.Hooks, described.Spec.Linux = info.described.Mounts, info.described.Hooks, &linux
	return described
}
