package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image"
	"berth/internal/errdefs"
	"berth/internal/join"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/oci"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/sandbox/stats"
)

// container is the one owner of a container's state.
type container struct {
	id, podID string
	config    *runtimeapi.ContainerConfig // as in rec, decoded; never changed
	turn      task.Turn
	created   *trace.Trace // where the time of its creation went; nil if an earlier daemon created it; never changed

	// These belong to the holder of turn.
	rec       state.ContainerRecord
	resources *runtimeapi.LinuxContainerResources // as in rec, decoded; replaced, never changed
	presented bool                                // plugins were asked about it
	removed   bool

	stopUntold atomic.Pointer[chan struct{}]   // closed when plugins were told of its exit; nil: nothing is to be told
	running    atomic.Pointer[running]         // nil without a shim
	launching  runtime.UnderWay                // when it is being made or launched
	info       atomic.Pointer[state.Container] // nil until created: nobody sees half a container
	started    atomic.Pointer[trace.Trace]     // where the time of its start went; nil unless this daemon started it
	sample     stats.SampleState               // what it has written
	looking    atomic.Bool                     // somebody looks at its mounts
}

// running is a container that has a shim.
type running struct {
	*runtime.Running
	meter *stats.ContainerMeter
}

func (c *container) String() string { return "container " + c.id }
func (c *container) Visible() bool  { return c.info.Load() != nil }

// Info implements state.Published.
func (c *container) Info() *state.Container { return c.info.Load() }

// Birth implements state.Published.
func (c *container) Birth() state.Birth { return state.Birth{At: c.rec.CreatedAt, ID: c.id} } // which never changes

// CreateContainer makes a container in a ready pod and returns its ID. A call
// with the identity and content of an existing container, or of one being made,
// returns that one.
//
// Errors: NotFound for the pod or the image, InvalidArgument for a config that
// can't be, FailedPrecondition if the pod is not ready, AlreadyExists for an
// identity in use with another content.
func (m *Manager) CreateContainer(ctx context.Context, podID string, config *runtimeapi.ContainerConfig) (string, error) {
	checking := trace.Begin(ctx, "check")
	defer checking.End() // where it fails
	p, err := m.readyPod(podID)
	if err != nil {
		return "", err
	}
	if err := state.CheckContainer(config, p.config); err != nil {
		return "", err
	}
	sum, err := join.Of(config)
	if err != nil {
		return "", err
	}
	identity := state.ContainerIdentity(p.id, config.Metadata)
	m.launchers.Expect() // who creates a container starts it at once
	defer m.tasks.BeginUpTo(task.Limit, "it to be made", identity)()
	checking.End()
	id, err := m.containerIDs.Create(ctx, identity, sum, join.Maker{
		Spawn:  m.tasks.Operations.Spawn,
		Make:   func() (string, error) { return m.newContainer(ctx, p, config, identity) },
		Remove: m.replaceContainer,
	})
	if err != nil {
		return "", createFailed(identity, err)
	}
	return id, nil
}

// createFailed names what could not be created: first, or, where kubelet looks at how the
// text begins, last.
func createFailed(identity string, err error) error {
	if errors.Is(err, crierrors.ErrImageVolumeMountFailed) || errors.Is(err, crierrors.ErrRROUnsupported) {
		return fmt.Errorf("%w (create %s)", err, identity)
	}
	return fmt.Errorf("create %s: %w", identity, err)
}

// newContainer runs in a goroutine of its own, whatever becomes of the caller.
func (m *Manager) newContainer(caller context.Context, p *pod, config *runtimeapi.ContainerConfig, identity string) (string, error) {
	defer m.tasks.BeginUpTo(task.Limit, "create", identity)()
	ctx, release := trace.Carry(m.tasks.Operations.Context(), caller)
	defer release()
	ctx, cancel := context.WithTimeout(ctx, task.Limit)
	defer cancel()
	var c *container
	err := m.tasks.Guard("plan", identity, func() (err error) { c, err = m.planContainer(ctx, p, config); return err })
	if err != nil {
		return "", err
	}
	err = m.tasks.Guard("create", identity, func() error {
		return m.tasks.WithTurn(ctx, c.turn, "create", c.String(), func() error { return m.makeContainer(ctx, p, c) })
	})
	if err != nil {
		m.abandonContainer(c)
		return "", err
	}
	return c.id, nil
}

// writtenName is the image's name as the pod's author wrote it. kubelet itself asks for images by
// their IDs.
func writtenName(config *runtimeapi.ContainerConfig) string {
	return cmp.Or(config.GetImage().GetUserSpecifiedImage(), config.GetImage().GetImage())
}

// planContainer decides everything that follows from the request and writes down
// what is about to exist.
func (m *Manager) planContainer(ctx context.Context, p *pod, config *runtimeapi.ContainerConfig) (*container, error) {
	ctx, span := trace.Nest(ctx, "plan")
	defer span.End()
	img, err := m.imageOf(config)
	if err != nil {
		return nil, err
	}
	c := &container{id: state.NewID(), podID: p.id, config: config, turn: task.NewTurn(), resources: config.GetLinux().GetResources(), created: trace.Of(ctx)}
	c.rec = state.ContainerRecord{ID: c.id, PodID: p.id, BootID: m.bootID, RunID: m.run.ID, Phase: state.ContainerCreated, CreatedAt: m.containerCreation(p.id),
		Image: state.Image{ID: img.ID, Ref: img.DigestedReference(writtenName(config)), Layers: img.Layers, Config: img.Config}}
	if c.rec.Volumes, err = m.roots.FindVolumes(config); err != nil {
		return nil, err
	}
	if c.rec.Config, err = proto.Marshal(config); err != nil {
		return nil, errdefs.InvalidArgument("encode container config: %w", err)
	}
	if c.rec.CgroupsPath, err = oci.CgroupsPath(p.config.GetLinux().GetCgroupParent(), c.id, m.cfg.SystemdCgroup); err != nil {
		return nil, err
	}
	if dir := p.config.GetLogDirectory(); dir != "" && config.GetLogPath() != "" {
		c.rec.LogPath = filepath.Join(dir, config.GetLogPath())
	}
	if c.rec.Project, err = m.roots.Quotas.Take(); err != nil {
		return nil, err
	}
	err = m.tasks.WithTurn(ctx, p.turn, "create a container in", p.String(), func() error { return m.enterContainer(ctx, p, c) })
	if err != nil {
		m.roots.Quotas.Release(c.rec.Project)
	}
	return c, err
}

// imageOf finds the image a config names: by the ID that kubelet got from
// PullImage, or any other reference.
func (m *Manager) imageOf(config *runtimeapi.ContainerConfig) (*image.Image, error) {
	ref := config.GetImage().GetImage()
	if ref == "" {
		return nil, errdefs.InvalidArgument("the container config names no image")
	}
	return m.images.Get(ref)
}

// enterContainer writes the record and enters the container, unless the pod is
// being stopped. It needs the pod's turn, so that who stops the pod sees either
// the container or its refusal.
func (m *Manager) enterContainer(ctx context.Context, p *pod, c *container) error {
	if info := p.info.Load(); info == nil || !info.Ready {
		return notReady(p)
	}
	if err := m.writeContainer(ctx, c); err != nil {
		return err
	}
	m.containers.Put(c.id, c)
	return nil
}

// writeContainer writes the record of a container that is being created or started. The caller has its turn.
func (m *Manager) writeContainer(ctx context.Context, c *container) error {
	defer trace.Begin(ctx, "record").End()
	return m.containerRecs.Write(c.id, c.rec)
}

// makeContainer makes the writable layer, lets plugins adjust the container, proves that it can be
// described to the launcher, and publishes it. It needs the container's turn, and gives up when its pod is stopped.
func (m *Manager) makeContainer(ctx context.Context, p *pod, c *container) error {
	if c.removed { // with its pod, before we had the turn
		return errdefs.FailedPrecondition("pod sandbox %s was removed", p.id)
	}
	looking, looked := c.launching.Begin(ctx)
	defer looked()
	if _, err := m.readyPod(p.id); err != nil { // a stop that has not seen the look begin is seen by this
		return err
	}
	target := m.toLaunch(c, c.resources, nil)
	root, err := m.launch.Root(ctx, p.described(), target)
	if err != nil {
		return err
	}
	if c.rec.User, err = m.launch.User(ctx, target, root); err != nil {
		return err
	}
	options := c.config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	if c.rec.SELinux, err = m.labels.Draw(m.selinux, options, p.rec.SELinux, *m.cfg.Host, c.id); err != nil {
		return err
	}
	m.appArmor.Ensure(ctx)
	others, err := m.describeContainer(ctx, looking, p, c)
	if err != nil && errors.Is(context.Cause(looking), runtime.ErrStopped) {
		return errdefs.Superseded(errdefs.FailedPrecondition("pod sandbox %s was stopped: %v", p.id, err))
	}
	if err != nil {
		return err
	}
	if err := m.plugins.UpdateOthers(ctx, others); err != nil {
		return err
	}
	m.tellOfContainer(ctx, nri.ContainerCreated, c)
	return nil
}

// describeContainer publishes a container that can be described, with what plugins want of it, and returns
// what they want of others. It needs the container's turn. looking, which is of ctx, ends looks at volumes.
func (m *Manager) describeContainer(ctx, looking context.Context, p *pod, c *container) (others []nri.Update, err error) {
	spec, err := m.launch.Prove(looking, p.described(), m.toLaunch(c, c.resources, nil)) // plugins see no container that can't be
	if err != nil {
		return nil, err
	}
	release, others, err := m.presentContainer(ctx, p, c, spec)
	defer release()
	if err != nil {
		return nil, err
	}
	if c.presented {
		if spec, err = m.launch.Spec(looking, p.described(), m.toLaunch(c, c.resources, c.rec.Limits)); err != nil {
			return nil, err
		}
	}
	c.rec.Process, c.rec.Described = spec.Process, runtime.ForPlugins(spec)
	if err := m.writeContainer(ctx, c); err != nil {
		return nil, err
	}
	m.publishContainer(c)
	return others, nil
}

// toLaunch is what the container is launched from, with these limits. Without the turn, only after it was published.
func (m *Manager) toLaunch(c *container, resources *runtimeapi.LinuxContainerResources, limits *nri.Limits) runtime.LaunchContainer {
	return runtime.LaunchContainer{Rec: &c.rec, Config: c.config, Resources: resources, Limits: limits,
		TargetPIDNS: func() (string, error) { return m.targetPIDNS(c) }}
}

// described is what descriptions need to know of a pod: for its pause before it is
// published, for containers afterwards. It reads of the record only what does not change any more.
func (p *pod) described() runtime.SpecPod {
	var pausePID int
	if info := p.info.Load(); info != nil {
		pausePID = info.PausePID
	}
	return runtime.NewSpecPod(&p.rec, p.config, pausePID)
}

// targetPIDNS is the PID namespace of the container that an ephemeral container is to join.
func (m *Manager) targetPIDNS(c *container) (string, error) {
	options := c.config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if options.GetPid() != runtimeapi.NamespaceMode_TARGET {
		return "", nil
	}
	target, err := m.containers.Find(options.GetTargetId())
	if err != nil {
		return "", fmt.Errorf("target of the PID namespace: %w", err)
	}
	if target.podID != c.podID {
		return "", errdefs.InvalidArgument("target container %s of the PID namespace is in another pod", target.id)
	}
	run := target.running.Load()
	if run == nil || run.HasEnded() {
		return "", errdefs.FailedPrecondition("target container %s of the PID namespace is not running", target.id)
	}
	return fmt.Sprintf("/proc/%d/ns/pid", run.PID), nil
}

// RuntimeSpec returns what the launcher is, or was, told of a container. Errors: NotFound, else as of runtime.Launcher.Describe, which
// may have to look at a volume that hangs.
func (m *Manager) RuntimeSpec(ctx context.Context, id string) (*specs.Spec, error) {
	c, err := m.containers.Find(id)
	if err != nil {
		return nil, err
	}
	p, err := m.pods.Find(c.podID)
	if err != nil {
		return nil, err
	}
	info := c.info.Load()
	return m.launch.Describe(ctx, p.described(), m.toLaunch(c, info.Resources, info.Limits), &c.looking)
}

// publishContainer makes the record visible. The caller has the container's turn.
func (m *Manager) publishContainer(c *container) {
	info := c.snapshot()
	m.events.ContainerChanged(c.info.Swap(info), info)
}

// snapshot is what the record says. The caller has the container's turn.
func (c *container) snapshot() *state.Container {
	var pid int
	var startedAt time.Time
	if run := c.running.Load(); run != nil {
		pid, startedAt = run.PID, run.StartedAt
	}
	return state.NewContainer(&c.rec, c.config, c.resources, pid, startedAt)
}

// abandonContainer undoes a container that could not be created. What can't be
// undone now is tried again and again.
func (m *Manager) abandonContainer(c *container) {
	ctx, cancel := context.WithTimeout(m.tasks.Operations.Context(), time.Minute)
	defer cancel()
	undo := func(ctx context.Context) error { return m.removeContainer(ctx, c) }
	if err := m.tasks.Guard("undo", c.String(), func() error { return undo(ctx) }); err != nil {
		m.log.Error("undo of a container that was not created", "container", c.id, "error", err)
		m.tasks.InBackground("undo", c.String(), undo)
	}
}

// RemoveContainer ends the container if it runs and removes everything that
// exists for it. It blocks until that is done, also when another call is at it. A
// container that is unknown is no error.
func (m *Manager) RemoveContainer(ctx context.Context, id string) error {
	c, err := m.containers.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.tasks.Detach(ctx, task.Limit, "remove", c.String(), func(ctx context.Context) error { return m.removeContainer(ctx, c) })
}

func (m *Manager) removeContainer(ctx context.Context, c *container) error {
	for {
		if err := m.killContainer(ctx, c); err != nil {
			return err
		}
		pass, err := m.tasks.Take(ctx, c.turn, "remove", c.String())
		if err != nil {
			return err
		}
		if c.running.Load() != nil { // started while we waited for the turn
			pass()
			continue
		}
		defer pass()
		if c.removed {
			return nil
		}
		return m.eraseContainer(ctx, c)
	}
}

// replaceContainer removes a container that was not started, or goes on with its removal.
// join.ErrInUse for any other.
func (m *Manager) replaceContainer(ctx context.Context, id string) error {
	c, known := m.containers.Get(id)
	if !known {
		return nil
	}
	return m.tasks.Detach(ctx, task.Limit, "replace", c.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, c.turn, "replace", c.String(), func() error {
			if c.removed {
				return nil
			}
			if c.rec.Phase != state.ContainerCreated && c.rec.Phase != state.Removing {
				return fmt.Errorf("container %s was started: %w", id, join.ErrInUse)
			}
			return m.eraseContainer(ctx, c)
		})
	})
}

// eraseContainer removes what exists for the container, its record last. It needs
// the container's turn and may be repeated.
func (m *Manager) eraseContainer(ctx context.Context, c *container) error {
	if c.rec.Phase != state.Removing {
		c.rec.Phase = state.Removing
		m.containerIDs.Going(state.ContainerIdentity(c.podID, c.config.Metadata), c.id)
		if err := m.containerRecs.Write(c.id, c.rec); err != nil {
			m.log.Warn("record a removal, which goes on", "container", c.id, "error", err) // a full disk must not keep what fills it
		}
	}
	steps := []func() error{
		func() error { return m.processes.Remove(ctx, c.id, c.rec.CgroupsPath) },
		func() error { return m.images.Release(c.id) },
		func() error { return m.roots.ReleaseVolumes(c.id, c.rec.Volumes) },
		func() error { return m.trash.Discard(m.dirs.Writable(c.id)) },
		func() error { return m.roots.Quotas.Clear(c.rec.Project) },
		func() error { return m.containerRecs.Remove(c.id) },
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return fmt.Errorf("remove container %s: %w", c.id, err)
		}
	}
	m.labels.Release(m.selinux, c.rec.SELinux, c.id)
	m.roots.Quotas.Release(c.rec.Project)
	c.removed = true
	m.containers.Remove(c.id)
	m.events.ContainerDeleted(c.info.Load())
	m.containerIDs.Forget(state.ContainerIdentity(c.podID, c.config.Metadata), c.id)
	if c.presented || c.Visible() {
		m.tellOfContainer(ctx, nri.ContainerRemoved, c)
	}
	return nil
}
