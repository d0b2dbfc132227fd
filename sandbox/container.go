package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/image"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/oci"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
)

// CreateContainer creates a container in a ready pod and returns its ID. A call with the identity
// and content of an existing container joins its creation, or returns its ID. current is the pod's
// config in the request, or nil. Only [state.CheckContainer] reads it.
//
// Errors: NotFound for the pod or the image. InvalidArgument for a malformed config.
// FailedPrecondition if the pod is not ready. AlreadyExists if the identity exists with other
// content.
func (m *Manager) CreateContainer(
	ctx context.Context, podID string, config *runtimeapi.ContainerConfig, current *runtimeapi.PodSandboxConfig,
) (string, error) {
	checking := trace.Begin(ctx, "check")
	defer checking.End() // after an error
	p, err := m.readyPod(podID)
	if err != nil {
		return "", err
	}
	if err := state.CheckContainer(config, p.Config, current); err != nil {
		return "", err
	}
	sum, err := fingerprintOf(config)
	if err != nil {
		return "", err
	}
	identity := state.ContainerIdentity(p.ID, config.Metadata)
	m.pool.Expect() // clients start a container right after its creation
	defer m.tasks.BeginUpTo(task.Timeout, "concurrent creation", identity)()
	checking.End()
	id, err := m.containerIDs.Create(ctx, identity, sum, maker{
		Spawn:  m.tasks.Operations.Spawn,
		Make:   func() (string, error) { return m.createContainer(ctx, p, containerPlan{config: config}, identity) },
		Remove: m.replaceContainer,
	})
	if err != nil {
		return "", createFailed(identity, err)
	}
	return id, nil
}

// createFailed adds the container's identity to an error.
func createFailed(identity string, err error) error {
	if state.BeginsForKubelet(err) {
		return fmt.Errorf("%w (create %s)", err, identity)
	}
	return fmt.Errorf("create %s: %w", identity, err)
}

// containerPlan is a container to create.
type containerPlan struct {
	config  *runtimeapi.ContainerConfig
	restore *state.Restore   // the checkpoint that the container continues; nil: it starts anew
	archive *archive.Archive // that checkpoint
}

// createContainer creates a container. It runs in a separate goroutine and continues when the
// caller leaves.
func (m *Manager) createContainer(caller context.Context, p *pod, plan containerPlan, identity string) (string, error) {
	defer m.tasks.BeginUpTo(task.Timeout, "create", identity)()
	ctx, release := trace.Carry(m.tasks.Operations.Context(), caller)
	defer release()
	ctx, cancel := context.WithTimeout(ctx, task.Timeout)
	defer cancel()
	p.start.AddContainer(trace.Of(ctx), plan.config.GetMetadata().GetName(), plan.config.GetMetadata().GetAttempt())
	var c *container
	err := m.tasks.Guard("plan", identity, func() (err error) { c, err = m.planContainer(ctx, p, plan); return err })
	if err != nil {
		return "", err
	}
	err = m.tasks.Guard("create", identity, func() error {
		return m.control.lockContainer(ctx, c, "create", func(c lockedContainer) error {
			return m.makeContainer(ctx, p, c, plan.archive)
		})
	})
	if err != nil {
		m.abandonContainer(c)
		return "", err
	}
	return c.ID, nil
}

// writtenName returns the image's name as the pod's author wrote it. kubelet requests images by
// their IDs.
func writtenName(config *runtimeapi.ContainerConfig) string {
	return cmp.Or(config.GetImage().GetUserSpecifiedImage(), config.GetImage().GetImage())
}

// planContainer decides the container's Spec, records it and enters the container.
func (m *Manager) planContainer(ctx context.Context, p *pod, plan containerPlan) (_ *container, err error) {
	ctx, span := trace.Nest(ctx, "plan")
	defer span.End()
	undo := cleanup.New()
	defer undo.Run(&err)
	config, namespace := plan.config, p.Config.GetMetadata().GetNamespace()
	img, err := m.imageOf(ctx, namespace, config)
	if err != nil {
		return nil, err
	}
	spec := &state.ContainerSpec{
		ID:        state.NewID(),
		PodID:     p.ID,
		BootID:    m.bootID,
		CreatedAt: m.objects.containerCreation(p.ID),
		Config:    config,
		Restore:   plan.restore,
		Image: state.Image{
			ID:     img.ID,
			Ref:    img.DigestedReference(writtenName(config)),
			Layers: img.Layers,
			Config: img.Config,
		},
	}
	if spec.Volumes, err = m.volumes.FindVolumes(ctx, namespace, config); err != nil {
		return nil, err
	}
	parent := p.Config.GetLinux().GetCgroupParent()
	if spec.CgroupsPath, err = m.node.CgroupsPath(parent, spec.ID); err != nil {
		return nil, err
	}
	if dir := p.Config.GetLogDirectory(); dir != "" && config.GetLogPath() != "" {
		spec.LogPath = filepath.Join(dir, config.GetLogPath())
	}
	options := config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	if spec.Labels, err = m.labels.Draw(m.selinux, options, p.Labels, m.node.Host, spec.ID); err != nil {
		return nil, err
	}
	undo.Add("release SELinux labels", func() error { m.labels.Release(m.selinux, spec.Labels, spec.ID); return nil })
	if spec.Project, err = m.quotas.Take(); err != nil {
		return nil, err
	}
	undo.Add("release quota project", func() error { m.quotas.Release(spec.Project); return nil })
	m.warnOfStopSignal(p, spec)
	c := newContainer(spec, state.NewContainerStatus(state.ContainerCreating))
	status := c.status.Unshared()
	status.RunID, status.Resources = m.run.ID, config.GetLinux().GetResources()
	if err := m.control.lockPod(ctx, p, "create a container in", func(lockedPod) error {
		return m.enterContainer(ctx, p, c.unshared())
	}); err != nil {
		return nil, err
	}
	undo.Release()
	return c, nil
}

// warnOfStopSignal logs that the image names a stop signal that does not exist. The container gets
// SIGTERM, as if no signal were set.
func (m *Manager) warnOfStopSignal(p *pod, c *state.ContainerSpec) {
	named := c.Image.Config.StopSignal
	if named == "" || c.Config.GetStopSignal() != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
		return
	}
	if _, err := oci.ParseSignal(named); err != nil {
		m.log.Warn("the image's stop signal does not exist; the container is stopped with SIGTERM",
			append(nameAttrs(p.Config.GetMetadata()), "containerName", errdefs.Clip(c.Config.GetMetadata().GetName()),
				"pod", p.ID, "container", c.ID, "image", errdefs.Clip(writtenName(c.Config)), "signal", errdefs.Clip(named))...)
	}
}

// imageOf finds the image of a config, by the ID that PullImage returned or by any other reference.
// The image must pass the signature policy of the pod's namespace, also if it was pulled under
// another policy.
func (m *Manager) imageOf(
	ctx context.Context, namespace string, config *runtimeapi.ContainerConfig,
) (*image.Image, error) {
	ref := config.GetImage().GetImage()
	if ref == "" {
		return nil, errdefs.InvalidArgument("the container config names no image")
	}
	img, err := m.images.Get(ref)
	if err != nil {
		return nil, err
	}
	if err := img.CheckRunnable(); err != nil {
		return nil, err
	}
	return img, m.images.Verify(ctx, img, writtenName(config), namespace)
}

// enterContainer records the container and enters it, unless the pod is being stopped. The caller
// holds the pod's lock, so a stop of the pod cannot miss the container.
func (m *Manager) enterContainer(ctx context.Context, p *pod, c lockedContainer) error {
	if info := p.info.Load(); info == nil || !info.Ready() {
		return notReady(p)
	}
	if err := m.writeContainer(ctx, c); err != nil {
		return err
	}
	m.objects.containers.Put(c.ID, c.container)
	return nil
}

// makeContainer creates the writable layer and the anonymous volumes, lets plugins adjust the
// container, validates its launch request, and publishes it. A stop of the pod cancels it. from is
// the checkpoint that the container continues, or nil.
func (m *Manager) makeContainer(ctx context.Context, p *pod, c lockedContainer, from *archive.Archive) error {
	if c.Phase() == state.Removed { // removed with its pod, before this call got the lock
		return errdefs.FailedPrecondition("pod sandbox %s was removed", p.ID)
	}
	inspectCtx, done := c.launching.Begin(ctx)
	defer done()
	if _, err := m.readyPod(p.ID); err != nil { // a stop of the pod before Begin could not cancel it
		return err
	}
	snapshot := c.snapshot()
	root, err := m.launcher.Root(ctx, p.Info(), snapshot)
	if err != nil {
		return err
	}
	if c.User, err = m.launcher.User(ctx, snapshot, root); err != nil {
		return err
	}
	if c.Anonymous, err = m.launcher.MakeVolumes(inspectCtx, snapshot, root); err != nil {
		return orStopped(inspectCtx, p, err)
	}
	fill := func(*specs.Spec) error { return nil }
	if from != nil {
		fill = func(runtimeSpec *specs.Spec) error {
			return m.restorer.fillContainer(inspectCtx, c, from, root, runtimeSpec)
		}
	}
	others, err := m.describeContainer(ctx, inspectCtx, p, c, fill)
	if err != nil {
		return orStopped(inspectCtx, p, err)
	}
	if err := m.plugins.caller.UpdateOthers(ctx, others); err != nil {
		return err
	}
	m.plugins.NotifyContainer(ctx, nri.ContainerCreated, c)
	return nil
}

// orStopped returns err, or the error for a stop of the pod, which has cancelled ctx.
func orStopped(ctx context.Context, p *pod, err error) error {
	if errors.Is(context.Cause(ctx), runtime.ErrStopped) {
		return errdefs.Superseded(errdefs.FailedPrecondition("pod sandbox %s was stopped: %v", p.ID, err))
	}
	return err
}

// describeContainer lets plugins adjust the container, records it and publishes it. It returns the
// changes of other containers that plugins request. inspectCtx, a child of ctx, cancels the
// inspection of volumes. fill gets the final spec before the container is published.
func (m *Manager) describeContainer(
	ctx, inspectCtx context.Context, p *pod, c lockedContainer, fill func(*specs.Spec) error,
) (others []nri.Update, err error) {
	target := m.objects.targetPIDNS(c.container)
	// Plugins do not see a container that cannot be launched.
	runtimeSpec, err := m.launcher.Validate(inspectCtx, p.Info(), c.snapshot(), target)
	if err != nil {
		return nil, err
	}
	c.planned = runtimeSpec
	release, others, err := m.plugins.PresentContainer(ctx, p, c, runtimeSpec)
	defer release()
	if err != nil {
		return nil, err
	}
	if c.planned == nil { // plugins have changed the container
		if runtimeSpec, err = m.describeChanged(inspectCtx, p, c); err != nil {
			return nil, err
		}
	}
	if c.planned = runtimeSpec; c.joinsTarget() {
		c.planned = nil
	}
	if err := fill(runtimeSpec); err != nil {
		return nil, err
	}
	c.Process, c.Described = runtimeSpec.Process, runtime.ForPlugins(runtimeSpec)
	if err := c.Move(state.ContainerCreated); err != nil {
		return nil, err
	}
	if err := m.writeContainer(ctx, c); err != nil {
		return nil, err
	}
	m.control.publishContainer(c)
	return others, nil
}

// describeTimeout limits describeChanged. All volumes have answered moments before.
const describeTimeout = 5 * time.Second

// describeChanged builds the runtime-spec of a container that plugins have changed. It inspects the
// sources of mounts during the hold, because the hold ends with the publication. A volume that
// hangs now is DeadlineExceeded. Without a limit it would block registrations, and so all other
// holds.
func (m *Manager) describeChanged(ctx context.Context, p *pod, c lockedContainer) (*specs.Spec, error) {
	ctx, cancel := context.WithTimeout(ctx, describeTimeout)
	defer cancel()
	spec, err := m.launcher.RuntimeSpec(ctx, p.Info(), c.snapshot(), m.objects.targetPIDNS(c.container))
	if err != nil {
		return nil, fmt.Errorf("describe container %s with the changes of NRI plugins: %w", c.ID, err)
	}
	return spec, nil
}

// RuntimeSpec returns the runtime-spec of a container, built from its record as for a launch.
// Errors: NotFound, and the errors of runtime.Launcher.Describe.
func (m *Manager) RuntimeSpec(ctx context.Context, id string) (*specs.Spec, error) {
	c, err := m.objects.containers.Find(id)
	if err != nil {
		return nil, err
	}
	p, err := m.objects.pods.Find(c.PodID)
	if err != nil {
		return nil, err
	}
	return m.launcher.Describe(ctx, p.Info(), c.Info(), m.objects.targetPIDNS(c), &c.describing)
}

// abandonContainer undoes a failed creation. Failed steps are retried in the background.
func (m *Manager) abandonContainer(c *container) {
	ctx, cancel := context.WithTimeout(m.tasks.Operations.Context(), time.Minute)
	defer cancel()
	undo := func(ctx context.Context) error { return m.removeContainer(ctx, c) }
	if err := m.tasks.Guard("undo", c.String(), func() error { return undo(ctx) }); err != nil {
		m.log.Error("undo of a container that was not created", "container", c.ID, "error", err)
		m.tasks.RetryInBackground("undo", c.String(), undo)
	}
}

// RemoveContainer kills the container if it runs, and removes all its resources. It waits for a
// concurrent removal. An unknown container is no error.
func (m *Manager) RemoveContainer(ctx context.Context, id string) error {
	c, err := m.objects.containers.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	deleted := m.trash.Since()
	err = m.tasks.Detach(ctx, task.Timeout, "remove", c.String(),
		func(ctx context.Context) error { return m.removeContainer(ctx, c) })
	if err == nil {
		deleted(ctx)
	}
	return err
}

func (m *Manager) removeContainer(ctx context.Context, c *container) error {
	for {
		if err := m.control.killContainer(ctx, c); err != nil {
			return err
		}
		started := false // while this call waited for the lock
		err := m.control.lockContainer(ctx, c, "remove", func(c lockedContainer) error {
			if started = c.running.Load() != nil; started {
				return nil
			}
			return m.eraseContainer(ctx, c)
		})
		if !started || err != nil {
			return err
		}
	}
}

// replaceContainer removes a container that was not started, or continues its removal. For any
// other container it returns errInUse.
func (m *Manager) replaceContainer(ctx context.Context, id string) error {
	c, known := m.objects.containers.Get(id)
	if !known {
		return nil
	}
	return m.tasks.Detach(ctx, task.Timeout, "replace", c.String(), func(ctx context.Context) error {
		return m.control.lockContainer(ctx, c, "replace", func(c lockedContainer) error {
			switch c.Phase() {
			case state.ContainerCreating, state.ContainerCreated, state.Removing, state.Removed:
			default:
				return fmt.Errorf("container %s was started: %w", id, errInUse)
			}
			return m.eraseContainer(ctx, c)
		})
	})
}

// eraseContainer removes all resources of the container, and its record last. It may be repeated.
func (m *Manager) eraseContainer(ctx context.Context, c lockedContainer) error {
	if c.Phase() == state.Removed {
		return nil
	}
	if c.Phase() != state.Removing {
		if err := c.Move(state.Removing); err != nil {
			return err
		}
		m.containerIDs.Going(c.Identity(), c.ID)
		if err := m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus); err != nil {
			// The removal continues, because it frees space on a full disk.
			m.log.Warn("record the removal of a container; the removal continues", "container", c.ID, "error", err)
		}
	}
	if err := m.removeParts(ctx, c.container); err != nil {
		return fmt.Errorf("remove container %s: %w", c.ID, err)
	}
	if err := c.Move(state.Removed); err != nil {
		return err
	}
	m.labels.Release(m.selinux, c.Labels, c.ID)
	m.quotas.Release(c.Project)
	m.objects.containers.Remove(c.ID)
	m.control.events.ContainerDeleted(c.info.Load())
	m.containerIDs.Forget(c.Identity(), c.ID)
	if c.Presented || c.Visible() {
		m.plugins.NotifyContainer(ctx, nri.ContainerRemoved, c)
	}
	return nil
}

// removeParts removes the container's processes, layers, files and record.
func (m *Manager) removeParts(ctx context.Context, c *container) error {
	if err := m.processes.Remove(ctx, c.ID, c.CgroupsPath); err != nil {
		return err
	}
	if err := m.images.Release(c.ID); err != nil {
		return err
	}
	if err := m.volumes.ReleaseVolumes(c.ID, c.Volumes); err != nil {
		return err
	}
	if err := m.trash.Discard(m.node.Writable(c.ID)); err != nil {
		return err
	}
	if err := m.quotas.Clear(c.Project); err != nil {
		return err
	}
	return m.records.RemoveContainer(c.ID)
}
