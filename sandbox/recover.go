package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	goruntime "runtime"

	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// recovery continues what an earlier daemon has left. It runs once, before the manager serves.
type recovery struct{ m *Manager }

// run adopts the objects of an earlier daemon. It watches running containers again, publishes
// exits, and schedules the undo of unfinished creations and removals. It starts plugins when all
// objects are loaded. Undo steps run in the background, because they may call slow plugins. When
// recover returns, all layers that containers need are held.
//
// Recovery treats an object as ended only if this is certain. After any failed look-up the daemon
// does not start, so that it kills no container by mistake.
func (r *recovery) run(ctx context.Context) error {
	if err := r.loadPodCIDR(); err != nil {
		return err
	}
	if err := r.loadPods(); err != nil {
		return err
	}
	if err := r.loadContainers(); err != nil {
		return err
	}
	if err := r.reserveLabels(); err != nil {
		return err
	}
	r.m.network.Collect(ctx, r.attachedPods)
	if err := r.recoverPods(); err != nil {
		return err
	}
	if err := r.recoverContainers(ctx); err != nil {
		return err
	}
	r.m.control.events.Recovered(r.m.objects.visible)
	if err := r.removeUnrecorded(); err != nil {
		return err
	}
	r.emptyTrash()
	if err := r.m.checkpoints.undoLeft(ctx); err != nil {
		return err
	}
	if err := r.m.plugins.caller.Start(ctx); err != nil {
		return err
	}
	r.m.unfinished.Start()
	return nil
}

// recoverPods recovers all pods, on all processors, because no client is answered meanwhile.
func (r *recovery) recoverPods() error {
	var pods errgroup.Group
	pods.SetLimit(goruntime.GOMAXPROCS(0))
	for _, p := range r.m.objects.pods.Snapshot() {
		pods.Go(func() error {
			if err := r.recoverPod(p.unshared()); err != nil {
				return fmt.Errorf("recover pod %s: %w", p.ID, err)
			}
			return nil
		})
	}
	return pods.Wait()
}

// recoverContainers recovers all containers. It looks up their shims in parallel.
func (r *recovery) recoverContainers(ctx context.Context) error {
	var shims errgroup.Group
	shims.SetLimit(findAtOnce)
	for _, c := range r.m.objects.containers.Snapshot() {
		launched, err := r.recoverContainer(c.unshared())
		if err != nil {
			return errors.Join(fmt.Errorf("recover container %s: %w", c.ID, err), shims.Wait())
		}
		if launched {
			shims.Go(func() error {
				return r.m.tasks.Guard("find the shim of", c.String(), func() error { return r.findMonitor(ctx, c) })
			})
		}
	}
	return shims.Wait()
}

// emptyTrash starts deleting the trash in the background, including an earlier version's trash.
func (r *recovery) emptyTrash() {
	r.m.tasks.Background.Spawn(func() { r.m.trash.Run(r.m.tasks.Background.Context()) })
	old := r.m.node.OldTrash()
	if _, err := os.Lstat(old); err != nil {
		return
	}
	// Deleted in place, because the writable layers may be on another filesystem.
	r.m.tasks.RetryInBackground("delete", old, func(ctx context.Context) error {
		failpoint.Reach("trash.delete-old")
		err := safefs.RemoveAll(ctx, old)
		failpoint.Reach("trash.old-deleted")
		return err
	})
}

// findAtOnce bounds the parallel look-ups of shims. Most look-ups are immediate. A look-up may take
// runtime.HandoverTimeout, and systemd gives a daemon five minutes to start.
const findAtOnce = 16

func (r *recovery) loadPodCIDR() error {
	damaged, err := r.m.network.Load()
	logDamaged(r.m.log, "runtime", damaged)
	return err
}

// attachedPods is an iter.Seq of the pods with network resources.
func (r *recovery) attachedPods(yield func(*state.PodSpec) bool) {
	for _, p := range r.m.objects.pods.Snapshot() {
		if p.status.Unshared().Network != nil && !yield(p.PodSpec) {
			return
		}
	}
}

func (r *recovery) loadPods() error {
	pods := map[string]*pod{}
	damaged, err := r.m.records.LoadPods(func(spec *state.PodSpec, status state.PodStatus) {
		pods[spec.ID] = newPod(spec, status, r.m.starts.history.Record(historyPod(spec)))
	})
	r.m.objects.pods.PutAll(pods)
	logDamaged(r.m.log, "pod", damaged)
	return err
}

func (r *recovery) loadContainers() error {
	containers := map[string]*container{}
	damaged, err := r.m.records.LoadContainers(func(spec *state.ContainerSpec, status state.ContainerStatus) {
		containers[spec.ID] = newContainer(spec, status)
		r.m.quotas.Keep(spec.Project)
	})
	r.m.objects.containers.PutAll(containers)
	logDamaged(r.m.log, "container", damaged)
	return err
}

// reserveLabels reserves the SELinux categories of recovered pods and containers. A container with
// its pod's labels holds the same categories.
func (r *recovery) reserveLabels() error {
	for _, p := range r.m.objects.pods.Snapshot() {
		if err := r.m.labels.Hold(r.m.selinux, p.Labels, p.ID); err != nil {
			return err
		}
	}
	for _, c := range r.m.objects.containers.Snapshot() {
		if err := r.m.labels.Hold(r.m.selinux, c.Labels, c.ID); err != nil {
			return err
		}
	}
	return nil
}

// recoverPod acts on the recorded phase. It needs no lock, because no other goroutine uses the pod
// yet.
func (r *recovery) recoverPod(p lockedPod) error {
	// No client got the ID, or a client requested the removal.
	if p.Phase() == state.PodStarting || p.Restoring || p.Phase() == state.Removing {
		r.m.deferUndo(p)
		return nil
	}
	sum, err := fingerprintOf(p.Config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: p.Handler})
	if err != nil {
		return err
	}
	r.m.podIDs.Adopt(state.PodIdentity(p.Config.Metadata), sum, p.ID)
	if image := p.PauseImage; image != nil {
		if _, err := r.m.images.Hold(p.ID, image.Layers); err != nil {
			r.m.log.Error("hold layers of a pause image", "pod", p.ID, "error", err)
		}
	}
	r.m.control.publishPod(p)
	switch p.Phase() {
	case state.PodReady:
		lost, err := r.stateLost(p.BootID, p.RunID, p.ID)
		if err != nil {
			return err
		}
		if !lost {
			r.markPod(p)
			return r.findPause(p)
		}
		return r.recoverStateless(p)
	case state.PodStopping:
		r.m.deferWithPod("stop", p.pod, r.m.stopPod) // some steps may be missing
		return nil
	}
	return fmt.Errorf("its record has the unknown phase %q", p.Phase())
}

// findPause watches the pause of a pod again, or publishes the pod as not ready. StopPodSandbox
// then removes its network.
func (r *recovery) findPause(p lockedPod) error {
	pause, err := openPause(p)
	if errors.Is(err, os.ErrProcessDone) {
		r.m.log.Warn("the pause of a pod has exited", "pod", p.ID)
		if err := r.m.publishPauseless(p); err != nil {
			return err
		}
		return r.finishStop(p)
	}
	if err != nil {
		return err
	}
	r.m.watchPause(p.pod, pause)
	return nil
}

// finishStop continues a stop that an earlier daemon could not record, for example on a read-only
// disk. No other step removes the leftovers of the launch.
func (r *recovery) finishStop(p lockedPod) error {
	_, err := os.Lstat(r.m.node.Shim(p.ID))
	if errors.Is(err, fs.ErrNotExist) {
		r.m.deferWithPod("stop", p.pod, r.m.stopPod)
		return nil
	}
	return err
}

// recoverContainer acts on the recorded phase. If launched is true, the caller inspects the shim
// directory.
func (r *recovery) recoverContainer(c lockedContainer) (launched bool, err error) {
	if !state.IsContainerPhase(c.Phase()) { // a phase of a later version, for which Move would refuse all transitions
		return false, fmt.Errorf("its record has the unknown phase %q", c.Phase())
	}
	_, known := r.m.objects.pods.Get(c.PodID)
	if !known || c.Phase() == state.Removing || c.Phase() == state.ContainerCreating {
		// The pod is lost, the container is being removed, or no client has got its ID.
		r.m.unfinished.Later("undo", c.String(), func(ctx context.Context) error {
			return r.m.removeContainer(ctx, c.container)
		})
		return false, nil
	}
	sum, err := fingerprintOf(c.Config)
	if err != nil {
		return false, err
	}
	r.m.containerIDs.Adopt(state.ContainerIdentity(c.PodID, c.Config.Metadata), sum, c.ID)
	if _, err := r.m.images.Hold(c.ID, c.Image.Layers); err != nil {
		r.m.log.Error("hold layers of a container", "container", c.ID, "image", c.Image.ID, "error", err)
	}
	if _, err := r.m.volumes.HoldVolumes(c.ID, c.Config, c.Volumes); err != nil {
		r.m.log.Error("hold layers of a container's image volumes", "container", c.ID, "error", err)
	}
	switch {
	case c.Phase() == state.ContainerExited:
		r.m.control.publishContainer(c)
		r.m.unfinished.Later("clean up after", c.String(), func(ctx context.Context) error { // the earlier daemon may not have cleaned up
			return r.m.control.lockContainer(ctx, c.container, "clean up after", func(c lockedContainer) error {
				if c.Phase() == state.Removed {
					return nil
				}
				return r.m.processes.Remove(ctx, c.ID, c.CgroupsPath)
			})
		})
		return false, nil
	case c.BootID != r.m.bootID:
		r.m.exited(c, exitOfRestart(c))
		return false, nil
	case c.Phase() == state.ContainerCreated:
		return false, r.recoverCreated(c)
	}
	return true, nil
}

// recoverCreated publishes a container that was not started. If its pod was lost, for example by a
// restart of the node, the container has exited.
func (r *recovery) recoverCreated(c lockedContainer) error {
	lost, err := r.stateLost(c.BootID, c.RunID, c.PodID)
	switch {
	case err != nil:
		return err
	case lost:
		r.m.exited(c, exitOfStateLost(c))
	default:
		r.markContainer(c)
		r.m.control.publishContainer(c)
	}
	return nil
}

// findMonitor watches the shim of a container again, or publishes how it ended.
func (r *recovery) findMonitor(ctx context.Context, found *container) error {
	return r.m.control.lockContainer(ctx, found, "find the shim of", func(c lockedContainer) error {
		return r.adoptMonitor(ctx, c)
	})
}

func (r *recovery) adoptMonitor(ctx context.Context, c lockedContainer) error {
	found, ids, err := r.m.processes.Find(ctx, c.ID)
	if err != nil {
		return err
	}
	if found == nil {
		lost, err := r.stateLost(c.BootID, c.RunID, c.ID, c.PodID)
		if err != nil {
			return err
		}
		if lost {
			return r.publishStateless(ctx, c)
		}
		r.markContainer(c)
		return r.publishLost(ctx, c, ids)
	}
	r.markContainer(c)
	run := &running{found, r.m.meters.openContainer(c.container)}
	if err := r.m.publishRunning(c, run); err != nil {
		return err
	}
	r.m.restorer.dropCheckpoint(c.container)
	r.m.meters.oomKills.begin(c.ID, r.m.meters.readOOMKills(c.container))
	r.m.watchContainer(c.container, run)
	r.m.killIfLayersLost(c)
	if c.WrongFiles != "" { // an earlier daemon could not kill it
		r.m.killWrong(c.container, c.WrongFiles)
	}
	return nil
}

// publishLost publishes a container whose shim is gone. If there is an exit record, the container
// has exited. If its launch never started, it is created. Otherwise it is lost. A container with a
// surviving process stays Running until that process exits.
func (r *recovery) publishLost(ctx context.Context, c lockedContainer, ids proto.PIDs) error {
	if ids.StartedAt.IsZero() {
		ids.StartedAt = c.StartedAt
	}
	ctx, cancel := context.WithTimeout(ctx, runtime.HandoverTimeout)
	defer cancel()
	exit, lost, err := r.m.processes.ReadExit(ctx, c.ID, ids.StartedAt)
	if err != nil {
		return err
	}
	if lost && ids.InitPID == 0 {
		r.startLost(ctx, c)
		return nil
	}
	if lost {
		r.m.processes.LogLost(c.ID)
		if err := r.m.processes.KillLeftBehind(ctx, c.ID, c.CgroupsPath); err != nil {
			r.m.log.Error("processes of a container without shim survive SIGKILL", "container", c.ID, "error", err)
			return r.watchLost(c, ids, exit)
		}
	}
	r.m.exited(c, exit)
	return nil
}

// startLost reverts a start that did not lead to a process. If that fails, it retries in the
// background. The container is then shown as created, but cannot be started until a retry succeeds.
func (r *recovery) startLost(ctx context.Context, c lockedContainer) {
	err := r.m.revertStart(ctx, c)
	if err == nil {
		return
	}
	const what = "revert the start of"
	r.m.log.Error(what+" a container; it is retried", "container", c.ID, "error", err)
	r.m.control.publishContainer(c)
	r.m.unfinished.Later(what, c.String(), func(ctx context.Context) error {
		return r.m.control.lockContainer(ctx, c.container, what, func(c lockedContainer) error {
			if c.Phase() != state.ContainerStarting {
				return nil
			}
			return r.m.revertStart(ctx, c)
		})
	})
}

// watchLost publishes a container without a shim as running while one of its processes survives
// SIGKILL. Such a process may be blocked in a call to a volume whose server does not answer. The
// container exits with the last process.
func (r *recovery) watchLost(c lockedContainer, ids proto.PIDs, exit state.Exit) error {
	left, err := runtime.LeftBehind(ids)
	if err != nil {
		return err
	}
	run := &running{left, r.m.meters.openContainer(c.container)}
	if err := r.m.publishRunning(c, run); err != nil {
		return err
	}
	r.m.meters.oomKills.begin(c.ID, r.m.meters.readOOMKills(c.container))
	r.m.watchRunning(c.container, run, func() {
		if exit, settled := r.m.stopper.SettleLost(r.m.control.stopTarget(c.container), exit); settled {
			r.m.noteExit(c.container, exit)
		}
	})
	return nil
}

// removeUnrecorded removes resources with the ID of a pod or container that has no record. Only
// single records can be missing here, because package ownership refuses a root that does not know
// the node's pods.
func (r *recovery) removeUnrecorded() error {
	ids, err := r.m.Unrecorded()
	for id := range ids {
		r.m.log.Warn("removing resources of a pod or container without record", "id", id)
		r.m.unfinished.LaterInQueue("remove unrecorded", id, func(ctx context.Context) error {
			return r.removeUnrecordedID(ctx, id)
		})
	}
	return err
}

// removeUnrecordedID removes all resources that a pod or container with this ID can have.
func (r *recovery) removeUnrecordedID(ctx context.Context, id string) error {
	failpoint.Reach("unrecorded.remove")
	if err := r.m.processes.RemoveByID(ctx, id); err != nil {
		return err // a process may survive, so its files stay
	}
	failpoint.Reach("unrecorded.processes-removed")
	return errors.Join(r.m.processes.RemoveRoot(id), r.m.podenv.RemoveUnrecorded(ctx, id))
}

func logDamaged(log *slog.Logger, kind string, damaged []record.Damaged) {
	for _, d := range damaged {
		log.Error("a damaged record was moved away", "kind", kind, "id", d.Name, "path", d.Path,
			"error", d.Err)
	}
}
