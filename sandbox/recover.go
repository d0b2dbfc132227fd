package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// recover adopts the objects of an earlier daemon. It watches running containers again, publishes
// exits, and schedules the undo of unfinished creations and removals. It starts plugins when all
// objects are loaded. Undo steps run in the background, because they may call slow plugins. When
// recover returns, all layers that containers need are held.
//
// Recovery treats an object as gone only if that is certain. After any failed look-up the daemon
// does not start, so that it kills no container by mistake.
func (m *Manager) recover(ctx context.Context) error {
	if err := m.loadPodCIDR(); err != nil {
		return err
	}
	if err := m.loadPods(); err != nil {
		return err
	}
	if err := m.loadContainers(); err != nil {
		return err
	}
	if err := m.reserveLabels(); err != nil {
		return err
	}
	m.network.Collect(ctx, m.attachedPods)
	if err := m.recoverPods(); err != nil {
		return err
	}
	if err := m.recoverContainers(ctx); err != nil {
		return err
	}
	if err := m.removeUnrecorded(); err != nil {
		return err
	}
	m.emptyTrash()
	if err := m.recoverCheckpoints(ctx); err != nil {
		return err
	}
	if err := m.plugins.Start(ctx); err != nil {
		return err
	}
	m.unfinished.Start()
	return nil
}

func (m *Manager) recoverPods() error {
	for _, p := range m.pods.Snapshot() {
		if err := m.recoverPod(p.unshared()); err != nil {
			return fmt.Errorf("recover pod %s: %w", p.ID, err)
		}
	}
	return nil
}

// recoverContainers recovers all containers. It looks up their shims in parallel.
func (m *Manager) recoverContainers(ctx context.Context) error {
	var shims errgroup.Group
	shims.SetLimit(findAtOnce)
	for _, c := range m.containers.Snapshot() {
		launched, err := m.recoverContainer(c.unshared())
		if err != nil {
			return errors.Join(fmt.Errorf("recover container %s: %w", c.ID, err), shims.Wait())
		}
		if launched {
			shims.Go(func() error {
				return m.tasks.Guard("find the shim of", c.String(), func() error { return m.findShim(ctx, c) })
			})
		}
	}
	return shims.Wait()
}

// emptyTrash starts deleting the trash in the background, including an earlier version's trash.
func (m *Manager) emptyTrash() {
	m.tasks.Background.Spawn(func() { m.trash.Run(m.tasks.Background.Context()) })
	old := m.dirs.OldTrash()
	if _, err := os.Lstat(old); err != nil {
		return
	}
	// Deleted in place, because the writable layers may be on another filesystem.
	m.tasks.RetryInBackground("delete", old, func(ctx context.Context) error {
		failpoint.Reach("trash.delete-old")
		err := safefs.RemoveAll(ctx, old)
		failpoint.Reach("trash.old-deleted")
		return err
	})
}

// findAtOnce bounds the parallel look-ups of shims. Most look-ups are immediate. One may take
// runtime.HandoverLimit, and systemd gives a daemon five minutes to start.
const findAtOnce = 16

func (m *Manager) loadPodCIDR() error {
	damaged, err := m.network.Load()
	m.logDamaged("runtime", damaged)
	return err
}

// attachedPods is an iter.Seq of the pods with network resources.
func (m *Manager) attachedPods(yield func(*state.PodSpec) bool) {
	for _, p := range m.pods.Snapshot() {
		if p.status.Unshared().Network != nil && !yield(p.PodSpec) {
			return
		}
	}
}

func (m *Manager) loadPods() error {
	pods := map[string]*pod{}
	damaged, err := m.records.LoadPods(func(spec *state.PodSpec, status state.PodStatus) {
		pods[spec.ID] = newPod(spec, status, m.history.Adopt(historyPod(spec)))
	})
	m.pods.PutAll(pods)
	m.logDamaged("pod", damaged)
	return err
}

func (m *Manager) loadContainers() error {
	containers := map[string]*container{}
	damaged, err := m.records.LoadContainers(func(spec *state.ContainerSpec, status state.ContainerStatus) {
		containers[spec.ID] = newContainer(spec, status)
		m.quotas.Keep(spec.Project)
	})
	m.containers.PutAll(containers)
	m.logDamaged("container", damaged)
	return err
}

func (m *Manager) logDamaged(kind string, damaged []record.Damaged) {
	for _, d := range damaged {
		m.log.Error("a damaged record was moved away", "kind", kind, "id", d.Name, "path", d.Path,
			"error", d.Err)
	}
}

// reserveLabels reserves the SELinux categories of recovered pods and containers. A container with
// its pod's labels holds the same categories.
func (m *Manager) reserveLabels() error {
	for _, p := range m.pods.Snapshot() {
		if err := m.labels.Hold(m.selinux, p.Labels, p.ID); err != nil {
			return err
		}
	}
	for _, c := range m.containers.Snapshot() {
		if err := m.labels.Hold(m.selinux, c.Labels, c.ID); err != nil {
			return err
		}
	}
	return nil
}

// recoverPod acts on the recorded phase. It needs no lock, because no other goroutine uses the
// manager yet.
func (m *Manager) recoverPod(p lockedPod) error {
	// No client got the ID, or a client requested the removal.
	if p.Phase() == state.PodStarting || p.Restoring || p.Phase() == state.Removing {
		m.deferUndo(p)
		return nil
	}
	sum, err := fingerprintOf(p.Config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: p.Handler})
	if err != nil {
		return err
	}
	m.podIDs.Adopt(state.PodIdentity(p.Config.Metadata), sum, p.ID)
	if image := p.PauseImage; image != nil {
		if _, err := m.images.Hold(p.ID, image.Layers); err != nil {
			m.log.Error("hold layers of a pause image", "pod", p.ID, "error", err)
		}
	}
	m.publishPod(p)
	switch p.Phase() {
	case state.PodReady:
		lost, err := m.stateLost(p.BootID, p.RunID, p.ID)
		if err != nil {
			return err
		}
		if !lost {
			m.markPod(p)
			return m.findPause(p)
		}
		return m.recoverStateless(p)
	case state.PodStopping:
		m.deferWithPod("stop", p.pod, m.stopPod) // some steps may be missing
		return nil
	}
	return fmt.Errorf("its record has the unknown phase %q", p.Phase())
}

// findPause watches the pause of a pod again, or publishes the pod as not ready. StopPodSandbox
// then removes its network.
func (m *Manager) findPause(p lockedPod) error {
	pause, err := openPause(p)
	if errors.Is(err, os.ErrProcessDone) {
		m.log.Warn("the pause of a pod has exited", "pod", p.ID)
		if err := m.publishPauseless(p); err != nil {
			return err
		}
		return m.finishStop(p)
	}
	if err != nil {
		return err
	}
	m.watchPause(p.pod, pause)
	return nil
}

// finishStop continues a stop that an earlier daemon could not record, on a read-only disk for
// example. No other step removes the leftovers of the launch.
func (m *Manager) finishStop(p lockedPod) error {
	_, err := os.Lstat(m.dirs.Shim(p.ID))
	if errors.Is(err, fs.ErrNotExist) {
		m.deferWithPod("stop", p.pod, m.stopPod)
		return nil
	}
	return err
}

// recoverContainer acts on the recorded phase. If launched is true, the caller inspects the shim
// directory.
func (m *Manager) recoverContainer(c lockedContainer) (launched bool, err error) {
	if !state.IsContainerPhase(c.Phase()) { // of a later version; Move would refuse all transitions
		return false, fmt.Errorf("its record has the unknown phase %q", c.Phase())
	}
	if _, known := m.pods.Get(c.PodID); !known || c.Phase() == state.Removing || c.Phase() == state.ContainerCreating {
		// The pod is lost, the container is being removed, or no client got its ID.
		m.unfinished.Later("undo", c.String(), func(ctx context.Context) error {
			return m.removeContainer(ctx, c.container)
		})
		return false, nil
	}
	sum, err := fingerprintOf(c.Config)
	if err != nil {
		return false, err
	}
	m.containerIDs.Adopt(state.ContainerIdentity(c.PodID, c.Config.Metadata), sum, c.ID)
	if _, err := m.images.Hold(c.ID, c.Image.Layers); err != nil {
		m.log.Error("hold layers of a container", "container", c.ID, "image", c.Image.ID, "error", err)
	}
	if _, err := m.volumes.HoldVolumes(c.ID, c.Config, c.Volumes); err != nil {
		m.log.Error("hold layers of a container's image volumes", "container", c.ID, "error", err)
	}
	switch {
	case c.Phase() == state.ContainerExited:
		m.publishContainer(c)
		m.unfinished.Later("clean up after", c.String(), func(ctx context.Context) error { // the earlier daemon may not have cleaned up
			return m.lockContainer(ctx, c.container, "clean up after", func(c lockedContainer) error {
				if c.Phase() == state.Removed {
					return nil
				}
				return m.processes.Remove(ctx, c.ID, c.CgroupsPath)
			})
		})
		return false, nil
	case c.BootID != m.bootID:
		m.exited(c, exitOfRestart(c))
		return false, nil
	case c.Phase() == state.ContainerCreated:
		return false, m.recoverCreated(c)
	}
	return true, nil
}

// recoverCreated publishes a container that was not started. If its pod was lost, by a restart of
// the node for example, the container has exited.
func (m *Manager) recoverCreated(c lockedContainer) error {
	lost, err := m.stateLost(c.BootID, c.RunID, c.PodID)
	switch {
	case err != nil:
		return err
	case lost:
		m.exited(c, exitOfStateLost(c))
	default:
		m.markContainer(c)
		m.publishContainer(c)
	}
	return nil
}

// findShim watches the shim of a container again, or publishes how it ended.
func (m *Manager) findShim(ctx context.Context, found *container) error {
	return m.lockContainer(ctx, found, "find the shim of", func(c lockedContainer) error { return m.adoptShim(ctx, c) })
}

func (m *Manager) adoptShim(ctx context.Context, c lockedContainer) error {
	found, ids, err := m.processes.Find(ctx, c.ID)
	if err != nil {
		return err
	}
	if found == nil {
		lost, err := m.stateLost(c.BootID, c.RunID, c.ID, c.PodID)
		if err != nil {
			return err
		}
		if lost {
			return m.publishStateless(ctx, c)
		}
		m.markContainer(c)
		return m.publishLost(ctx, c, ids)
	}
	m.markContainer(c)
	run := &running{found, m.containerMeter(c.container)}
	if err := m.publishRunning(c, run); err != nil {
		return err
	}
	m.dropCheckpoint(c.container)
	m.oomKills.begin(c.ID, m.readOOMKills(c.container))
	m.watchContainer(c.container, run)
	m.killIfLayersLost(c)
	if c.Distrust != "" { // an earlier daemon could not kill it
		m.killDistrusted(c.container, c.Distrust)
	}
	return nil
}

// publishLost publishes a container whose shim is gone. It has exited if it has an exit record, it
// is created if its launch never started, and it is lost otherwise. A container with a surviving
// process stays Running until that process exits.
func (m *Manager) publishLost(ctx context.Context, c lockedContainer, ids proto.Processes) error {
	if ids.StartedAt.IsZero() {
		ids.StartedAt = c.StartedAt
	}
	ctx, cancel := context.WithTimeout(ctx, runtime.HandoverLimit)
	defer cancel()
	exit, lost, err := m.processes.ReadExit(ctx, c.ID, ids.StartedAt)
	if err != nil {
		return err
	}
	if lost && ids.InitPID == 0 {
		m.startLost(ctx, c)
		return nil
	}
	if lost {
		m.processes.LogLost(c.ID)
		if err := m.processes.KillLeftBehind(ctx, c.ID, c.CgroupsPath); err != nil {
			m.log.Error("processes of a container without shim survive SIGKILL", "container", c.ID, "error", err)
			return m.watchLost(c, ids, exit)
		}
	}
	m.exited(c, exit)
	return nil
}

// startLost reverts a start that did not lead to a process. If that fails, it retries in the
// background. The container is then shown as created, but cannot be started until a retry succeeds.
func (m *Manager) startLost(ctx context.Context, c lockedContainer) {
	err := m.revertStart(ctx, c)
	if err == nil {
		return
	}
	const what = "revert the start of"
	m.log.Error(what+" a container; it is retried", "container", c.ID, "error", err)
	m.publishContainer(c)
	m.unfinished.Later(what, c.String(), func(ctx context.Context) error {
		return m.lockContainer(ctx, c.container, what, func(c lockedContainer) error {
			if c.Phase() != state.ContainerStarting {
				return nil
			}
			return m.revertStart(ctx, c)
		})
	})
}

// watchLost publishes a container without a shim as running while one of its processes survives
// SIGKILL. Such a process may be blocked in a call to a volume whose server does not answer. The
// container exits with the last process.
func (m *Manager) watchLost(c lockedContainer, ids proto.Processes, exit state.Exit) error {
	left, err := runtime.LeftBehind(ids)
	if err != nil {
		return err
	}
	run := &running{left, m.containerMeter(c.container)}
	if err := m.publishRunning(c, run); err != nil {
		return err
	}
	m.oomKills.begin(c.ID, m.readOOMKills(c.container))
	m.watchRunning(c.container, run, func() {
		if exit, settled := m.stopper.SettleLost(m.stopTarget(c.container), exit); settled {
			m.noteExit(c.container, exit)
		}
	})
	return nil
}

// revertStart moves a container back to created if its start was interrupted, so that the client
// can retry. The launcher has undone its steps, or was lost. If the command ran before the launcher
// noticed the shutdown, it runs a second time. kubelet would also run it again, in a new container.
func (m *Manager) revertStart(ctx context.Context, c lockedContainer) error {
	if err := m.processes.Remove(ctx, c.ID, c.CgroupsPath); err != nil {
		return err
	}
	if err := c.Move(state.ContainerCreated); err != nil {
		return err
	}
	c.StartedAt = time.Time{}
	if err := m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus); err != nil {
		m.log.Warn("record that a start was reverted; the next daemon will revert it again", "container", c.ID,
			"error", err)
	}
	m.publishContainer(c)
	return nil
}

// Unrecorded returns the IDs of pods and containers without a record that have files on the host.
// They are removed in the background.
func (m *Manager) Unrecorded() (map[string]bool, error) { return m.podenv.Unrecorded(m.hasRecord) }

// removeUnrecorded removes resources with the ID of a pod or container that has no record. Single
// records were lost: package ownership refuses a root that does not know the node's pods.
func (m *Manager) removeUnrecorded() error {
	ids, err := m.Unrecorded()
	for id := range ids {
		m.log.Warn("removing resources of a pod or container without record", "id", id)
		m.unfinished.LaterInQueue("remove unrecorded", id, func(ctx context.Context) error {
			return m.removeUnrecordedID(ctx, id)
		})
	}
	return err
}

// removeUnrecordedID removes all resources that a pod or container with this ID can have.
func (m *Manager) removeUnrecordedID(ctx context.Context, id string) error {
	failpoint.Reach("unrecorded.remove")
	if err := m.processes.RemoveByID(ctx, id); err != nil {
		return err // a process may survive, so its files stay
	}
	failpoint.Reach("unrecorded.processes-removed")
	return errors.Join(m.processes.RemoveRoot(id), m.podenv.RemoveUnrecorded(ctx, id))
}

func (m *Manager) hasRecord(id string) bool {
	_, pod := m.pods.Get(id)
	_, ctr := m.containers.Get(id)
	return pod || ctr
}
