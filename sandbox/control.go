package sandbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/oci"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
)

// control locks and publishes pods and containers, stops containers and changes their limits. Both
// clients (through Manager) and plugins (through pluginRuntime) use it. It does not call plugins.
type control struct {
	objects objects
	node    state.Node
	tasks   *task.Runner
	events  *state.Events
	records Records
	stopper Stopper
}

// lockPod calls op while it holds the pod's lock.
func (k *control) lockPod(ctx context.Context, p *pod, what string, op func(lockedPod) error) error {
	return p.status.With(ctx, k.tasks, what, p.String(), func(status *state.PodStatus) error {
		return op(lockedPod{p, status})
	})
}

// lockContainer calls op while it holds the container's lock.
func (k *control) lockContainer(ctx context.Context, c *container, what string, op func(lockedContainer) error) error {
	return c.status.With(ctx, k.tasks, what, c.String(),
		func(status *state.ContainerStatus) error { return op(lockedContainer{c, status}) })
}

// publishPod publishes a snapshot of the pod.
func (k *control) publishPod(p lockedPod) {
	info := p.snapshot()
	k.events.PodChanged(p.info.Swap(info), info)
}

// publishContainer publishes a snapshot of the container.
func (k *control) publishContainer(c lockedContainer) {
	info := c.snapshot()
	k.events.ContainerChanged(c.info.Swap(info), info)
}

// StopContainer sends the container's stop signal, unless an earlier call has sent it. It waits up
// to timeout for the exit, and then kills the container. A zero timeout kills it at once. A
// container that does not run or does not exist is no error. A starting container is stopped after
// its start. If the start takes longer than timeout, StopContainer cancels the launch.
func (k *control) StopContainer(ctx context.Context, id string, timeout time.Duration) error {
	c, err := k.objects.containers.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	total := task.Timeout
	if timeout < math.MaxInt64-total {
		total += timeout
	}
	return k.tasks.DetachWait(ctx, total, "stop", c.String(), func(ctx context.Context) error {
		return k.stopContainer(ctx, c, timeout)
	})
}

// stopContainer returns when the container has exited and plugins were notified.
func (k *control) stopContainer(ctx context.Context, c *container, timeout time.Duration) error {
	if err := k.endContainer(ctx, c, timeout); err != nil {
		return err
	}
	return k.waitNotified(ctx, c)
}

// endContainer holds no lock while it waits, because the exit is published under the lock.
func (k *control) endContainer(ctx context.Context, c *container, timeout time.Duration) error {
	var run *running
	defer c.dumping.Stop()()
	overdue := time.AfterFunc(min(timeout, math.MaxInt64-runtime.KillTimeout)+runtime.KillTimeout, c.launching.Cancel)
	err := k.lockContainer(ctx, c, "stop", func(c lockedContainer) error { run = c.running.Load(); return nil })
	overdue.Stop()
	if err != nil || run == nil {
		return err
	}
	return k.stopper.Stop(ctx, k.stopTarget(c), run.Running, stopSignal(c), timeout)
}

// killContainer kills a container and waits for its exit (see runtime.Stopper). A container that
// does not run is no error. The caller must not hold the container's lock, because the exit is
// published under this lock.
func (k *control) killContainer(ctx context.Context, c *container) error {
	defer c.dumping.Stop()()
	return k.stopper.Kill(ctx, k.stopTarget(c))
}

func (k *control) stopTarget(c *container) runtime.StopTarget {
	return runtime.StopTarget{
		ID:          c.ID,
		CgroupsPath: c.CgroupsPath,
		Runtime:     k.objects.runtimeOf(c),
		Running: func() *runtime.Running {
			if run := c.running.Load(); run != nil {
				return run.Running
			}
			return nil
		},
	}
}

// stopSignal returns the stop signal of the config, or else of the image, or else SIGTERM.
func stopSignal(c *container) unix.Signal {
	return oci.StopSignal(c.Config.GetStopSignal(), c.Image.Config.StopSignal)
}

// waitNotified waits until plugins were notified of a published exit.
func (k *control) waitNotified(ctx context.Context, c *container) error {
	notified := c.stopNotified.Load()
	if notified == nil {
		return nil
	}
	defer k.tasks.Begin("notification of plugins", c.String())()
	select {
	case <-*notified:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("notify plugins of the exit of container %s: %w", c.ID, ctx.Err())
	}
}

func checkUpdatable(c lockedContainer) error {
	if c.Phase() == state.Removed {
		return errdefs.NotFound("container %q does not exist", c.ID)
	}
	if c.Phase() != state.ContainerCreated && c.Phase() != state.ContainerRunning {
		return errdefs.FailedPrecondition("container %s has exited", c.ID)
	}
	return nil
}

// changeResources applies, records and publishes new limits, or changes nothing. It changes the
// kernel's limits first. If the daemon dies before the record is written, the status shows the old
// limits, and kubelet repeats the update.
func (k *control) changeResources(ctx context.Context, c lockedContainer, change nri.Update) (err error) {
	limitsBefore, resourcesBefore := c.Limits, c.Resources
	if err := k.setResources(c, mergeResources(c.Resources, change.Resources), c.Limits.Merge(change.Limits)); err != nil {
		return err
	}
	restore := func() error { return nil }
	if c.Phase() == state.ContainerRunning {
		restore, err = k.applyLimits(ctx, c, resourcesBefore, limitsBefore)
	}
	if err == nil {
		if err = k.records.WriteContainer(c.ContainerSpec, c.ContainerStatus); err != nil {
			err = errors.Join(err, restore())
		}
	}
	if err != nil {
		c.Limits, c.Resources = limitsBefore, resourcesBefore
		return err
	}
	k.publishContainer(c)
	return nil
}

// setResources checks and stores limits without recording them.
func (k *control) setResources(c lockedContainer, resources *runtimeapi.LinuxContainerResources,
	added *nri.Limits) error {
	if _, err := kernelLimits(resources, added, k.node.Host); err != nil {
		return err
	}
	c.Limits, c.Resources, c.planned = added, resources, nil
	return nil
}

// applyLimits sets all the container's limits, or none. restore sets the previous limits. In a
// virtual machine, the shim sets them, because the container has no cgroup on the node.
func (k *control) applyLimits(ctx context.Context, c lockedContainer, resources *runtimeapi.LinuxContainerResources,
	limits *nri.Limits) (restore func() error, err error) {
	wanted, err := kernelLimits(c.Resources, c.Limits, k.node.Host)
	if err != nil {
		return nil, err
	}
	if program := k.objects.runtimeOf(c.container); program != nil && program.SetsLimits() {
		before, err := kernelLimits(resources, limits, k.node.Host)
		if err == nil {
			err = program.Update(ctx, c.ID, wanted)
		}
		if err != nil {
			return nil, fmt.Errorf("update container %s: %w", c.ID, err)
		}
		return func() error { return program.Update(context.WithoutCancel(ctx), c.ID, before) }, nil
	}
	restore, err = setLimits(k.node, c.CgroupsPath, wanted)
	if err != nil {
		return nil, fmt.Errorf("update container %s: %w", c.ID, err)
	}
	return restore, nil
}
