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

	"berth/checkpoint"
	"berth/internal/failpoint"
	"berth/internal/join"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// recover makes the objects of an earlier daemon this one's: what runs is watched
// again, what ended is published as ended, what was half made is undone, what was half
// removed is removed. Plugins are started when everything is known. Undoing goes on in the background: it may need
// plugins that take their time. When recover returns, every layer that a container needs is held.
//
// Only what is certainly gone counts as gone. Anything else that can't be found
// out is an error, and the daemon does not start: that kills nobody.
func (m *Manager) recover(ctx context.Context) error {
	for _, step := range []func() error{m.loadPodCIDR, m.loadPods, m.loadContainers, m.reserveLabels} {
		if err := step(); err != nil {
			return err
		}
	}
	m.networks.Collect(ctx, m.recordedPods)
	for _, p := range m.pods.Snapshot() {
		if err := m.recoverPod(p); err != nil {
			return fmt.Errorf("recover pod %s: %w", p.id, err)
		}
	}
	var shims errgroup.Group
	shims.SetLimit(findAtOnce)
	for _, c := range m.containers.Snapshot() {
		launched, err := m.recoverContainer(c)
		if err != nil {
			return errors.Join(fmt.Errorf("recover container %s: %w", c.id, err), shims.Wait())
		}
		if launched {
			shims.Go(func() error {
				return m.tasks.Guard("find the shim of", c.String(), func() error { return m.findShim(ctx, c) })
			})
		}
	}
	if err := shims.Wait(); err != nil {
		return err
	}
	if err := m.removeUnrecorded(); err != nil {
		return err
	}
	m.emptyTrash()
	if err := m.plugins.Start(ctx); err != nil {
		return err
	}
	m.unfinished.Start()
	return nil
}

// emptyTrash starts deleting removed directories in the background, also those that an earlier daemon left.
func (m *Manager) emptyTrash() {
	m.tasks.Background.Spawn(func() { m.trash.Run(m.tasks.Background.Context()) })
	old := m.dirs.OldTrash()
	if _, err := os.Lstat(old); err != nil {
		return
	}
	// Deleted in its place: the writable layers may be on another filesystem.
	m.tasks.RetryInBackground("delete", old, func(ctx context.Context) error {
		failpoint.Reach("trash.delete-old")
		err := safefs.RemoveAll(ctx, old)
		failpoint.Reach("trash.old-deleted")
		return err
	})
}

// findAtOnce bounds how many shims are looked for at a time. Most are found at once, but one that ends just then, or what a lost
// one left, may take as long as runtime.HandoverLimit, and systemd waits five minutes for a daemon.
const findAtOnce = 16

func (m *Manager) loadPodCIDR() error {
	damaged, err := m.networks.Load()
	m.logDamaged("runtime", damaged)
	return err
}

// recordedPods is an iter.Seq2.
func (m *Manager) recordedPods(yield func(*state.PodRecord, *runtimeapi.PodSandboxConfig) bool) {
	for _, p := range m.pods.Snapshot() {
		if !yield(&p.rec, p.config) {
			return
		}
	}
}

func (m *Manager) loadPods() error {
	pods := map[string]*pod{}
	damaged, err := m.podRecords.Load(func(name string, _ int, body []byte) error {
		rec, config, update, err := state.ReadPod(name, body)
		if err != nil {
			return err
		}
		p := &pod{id: name, turn: task.NewTurn(), config: config, rec: rec}
		if update != nil {
			p.updated = p.withResources(update)
		}
		pods[p.id] = p
		return nil
	})
	m.pods.PutAll(pods)
	m.logDamaged("pod", damaged)
	return err
}

func (m *Manager) loadContainers() error {
	containers := map[string]*container{}
	damaged, err := m.containerRecs.Load(func(name string, _ int, body []byte) error {
		rec, config, resources, err := state.ReadContainer(name, body)
		if err != nil {
			return err
		}
		c := &container{id: name, podID: rec.PodID, turn: task.NewTurn(), config: config, resources: resources, rec: rec}
		containers[c.id] = c
		m.roots.Quotas.Keep(rec.Project)
		return nil
	})
	m.containers.PutAll(containers)
	m.logDamaged("container", damaged)
	return err
}

func (m *Manager) logDamaged(kind string, damaged []checkpoint.Damaged) {
	for _, d := range damaged {
		m.log.Error("a record can't be trusted and was set aside", "kind", kind, "id", d.Name, "path", d.Path, "error", d.Err)
	}
}

// reserveLabels keeps the categories of the pods and containers that an earlier daemon
// made. Containers with their pod's labels hold the same ones.
func (m *Manager) reserveLabels() error {
	for _, p := range m.pods.Snapshot() {
		if err := m.labels.Hold(m.selinux, p.rec.SELinux, p.id); err != nil {
			return err
		}
	}
	for _, c := range m.containers.Snapshot() {
		if err := m.labels.Hold(m.selinux, c.rec.SELinux, c.id); err != nil {
			return err
		}
	}
	return nil
}

// recoverPod decides by phase. No turn is needed: nobody else knows the manager yet.
func (m *Manager) recoverPod(p *pod) error {
	if p.rec.Phase == state.PodStarting || p.rec.Phase == state.Removing { // never reported, or to go
		m.unfinished.LaterWithPod("undo", p.String(), p.turn, func(ctx context.Context) error { return m.erasePod(ctx, p) })
		return nil
	}
	sum, err := join.Of(p.config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: p.rec.Handler})
	if err != nil {
		return err
	}
	m.podIDs.Adopt(state.PodIdentity(p.config.Metadata), sum, p.id)
	if image := p.rec.PauseImage; image != nil {
		if _, err := m.images.Hold(p.id, image.Layers); err != nil {
			m.log.Error("pause image", "pod", p.id, "error", err)
		}
	}
	m.publishPod(p)
	switch p.rec.Phase {
	case state.PodReady:
		lost, err := m.stateLost(p.rec.BootID, p.rec.RunID, p.id)
		if err != nil {
			return err
		}
		if !lost {
			m.markPod(p)
			return m.findPause(p)
		}
		return m.recoverStateless(p)
	case state.PodStopped:
		m.unfinished.LaterWithPod("stop", p.String(), p.turn, func(ctx context.Context) error { return m.stopPod(ctx, p) }) // perhaps it was half done
		return nil
	}
	return fmt.Errorf("its record has the unknown phase %q", p.rec.Phase)
}

// findPause watches the pause of a pod again, or publishes the pod as not ready:
// its network is there still and goes with StopPodSandbox.
func (m *Manager) findPause(p *pod) error {
	pause, err := openPause(p)
	if errors.Is(err, os.ErrProcessDone) {
		m.log.Warn("the pause process is gone", "pod", p.id)
		m.publishPauseless(p)
		return m.finishStop(p)
	}
	if err != nil {
		return err
	}
	m.watchPause(p, pause)
	return nil
}

// finishStop goes on with a stop that an earlier daemon could not write down, on a read-only disk say: nothing else removes what
// the launch of the pause has made.
func (m *Manager) finishStop(p *pod) error {
	_, err := os.Lstat(m.dirs.Shim(p.id))
	if errors.Is(err, fs.ErrNotExist) {
		m.unfinished.LaterWithPod("stop", p.String(), p.turn, func(ctx context.Context) error { return m.stopPod(ctx, p) })
		return nil
	}
	return err
}

// recoverContainer decides by phase. Of one that was launched in this boot the shim directory tells the rest.
func (m *Manager) recoverContainer(c *container) (launched bool, err error) {
	if _, known := m.pods.Get(c.podID); !known || c.rec.Phase == state.Removing || c.rec.Process == nil {
		// Without its pod, to go, or never reported.
		m.unfinished.Later("undo", c.String(), func(ctx context.Context) error { return m.removeContainer(ctx, c) })
		return false, nil
	}
	sum, err := join.Of(c.config)
	if err != nil {
		return false, err
	}
	m.containerIDs.Adopt(state.ContainerIdentity(c.podID, c.config.Metadata), sum, c.id)
	if _, err := m.images.Hold(c.id, c.rec.Image.Layers); err != nil {
		m.log.Error("layers of a container", "container", c.id, "image", c.rec.Image.ID, "error", err)
	}
	if _, err := m.roots.HoldVolumes(c.id, c.config, c.rec.Volumes); err != nil {
		m.log.Error("layers of a container's image volumes", "container", c.id, "error", err)
	}
	switch {
	case c.rec.Phase == state.ContainerExited:
		m.publishContainer(c)
		m.unfinished.Later("clean up after", c.String(), func(ctx context.Context) error { // perhaps it was not
			return m.tasks.WithTurn(ctx, c.turn, "clean up after", c.String(), func() error {
				if c.removed {
					return nil
				}
				return m.processes.Remove(ctx, c.id, c.rec.CgroupsPath)
			})
		})
		return false, nil
	case c.rec.BootID != m.bootID:
		m.exited(c, exitOfRestart(c))
		return false, nil
	case c.rec.Phase == state.ContainerCreated:
		return false, m.recoverCreated(c)
	case c.rec.Phase != state.ContainerStarting && c.rec.Phase != state.ContainerRunning:
		return false, fmt.Errorf("its record has the unknown phase %q", c.rec.Phase)
	}
	return true, nil
}

// recoverCreated publishes a container that was not started. It ends with its pod where that is
// lost, as after a reboot.
func (m *Manager) recoverCreated(c *container) error {
	lost, err := m.stateLost(c.rec.BootID, c.rec.RunID, c.podID)
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
func (m *Manager) findShim(ctx context.Context, c *container) error {
	found, ids, err := m.processes.Find(ctx, c.id)
	if err != nil {
		return err
	}
	if found == nil {
		lost, err := m.stateLost(c.rec.BootID, c.rec.RunID, c.id, c.podID)
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
	run := &running{found, m.containerMeter(c)}
	m.publishRunning(c, run)
	m.watchContainer(c, run)
	return nil
}

// publishLost publishes a container whose shim is gone: by its exit record, as
// lost, or, if it never got to start the container, as created. One of which something does not end runs until it does.
func (m *Manager) publishLost(ctx context.Context, c *container, ids proto.Processes) error {
	if ids.StartedAt.IsZero() {
		ids.StartedAt = c.rec.StartedAt
	}
	ctx, cancel := context.WithTimeout(ctx, runtime.HandoverLimit)
	defer cancel()
	exit, lost, err := m.processes.ReadExit(ctx, c.id, ids.StartedAt)
	if err != nil {
		return err
	}
	if lost && ids.InitPID == 0 {
		m.startLost(ctx, c)
		return nil
	}
	if lost {
		m.processes.LogLost(c.id)
		if err := m.processes.KillLeftBehind(ctx, c.id, c.rec.CgroupsPath); err != nil {
			m.log.Error("what a lost shim left does not end", "container", c.id, "error", err)
			return m.watchLost(c, ids, exit)
		}
	}
	m.exited(c, exit)
	return nil
}

// startLost takes back a start that has not led to a process, at once or, if something of it does not go, in the background. Until
// then the container is one that was created, and can't be started.
func (m *Manager) startLost(ctx context.Context, c *container) {
	err := m.takeStartBack(ctx, c)
	if err == nil {
		return
	}
	const what = "take back the start of"
	m.log.Error(what+" a container; it is tried again", "container", c.id, "error", err)
	m.publishContainer(c)
	m.unfinished.Later(what, c.String(), func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, c.turn, what, c.String(), func() error {
			if c.removed || c.rec.Phase != state.ContainerStarting {
				return nil
			}
			return m.takeStartBack(ctx, c)
		})
	})
}

// watchLost publishes a container as running of which a process is left that SIGKILL does not end, in a call to a volume whose server
// does not answer for one, and as exited when nothing of it is left.
func (m *Manager) watchLost(c *container, ids proto.Processes, exit state.Exit) error {
	left, err := runtime.LeftBehind(ids)
	if err != nil {
		return err
	}
	run := &running{left, m.containerMeter(c)}
	m.publishRunning(c, run)
	m.watchRunning(c, run, func() {
		if exit, settled := m.ending.SettleLost(m.toEnd(c), exit); settled {
			m.noteExit(c, exit)
		}
	})
	return nil
}

// takeStartBack makes a container created again that a daemon was about to start when it ended, so that the start
// can be tried again: who asked for it was not told that it failed. Its launcher has undone what it did, or was lost. A
// command that ran for the moment until the launcher noticed that its daemon was gone runs once more, as it would if kubelet
// made the container anew.
func (m *Manager) takeStartBack(ctx context.Context, c *container) error {
	if err := m.processes.Remove(ctx, c.id, c.rec.CgroupsPath); err != nil {
		return err
	}
	c.rec.Phase, c.rec.StartedAt = state.ContainerCreated, time.Time{}
	if err := m.containerRecs.Write(c.id, c.rec); err != nil {
		m.log.Warn("record that a start was taken back; the next daemon will do it once more", "container", c.id, "error", err)
	}
	m.publishContainer(c)
	return nil
}

// removeUnrecorded removes what bears the ID of a pod or container that has no record.
func (m *Manager) removeUnrecorded() error {
	ids, err := m.podenv.Unrecorded(m.hasRecord)
	for id := range ids {
		m.log.Warn("removing what a pod or container without record left", "id", id)
		m.unfinished.Later("remove what is left of", id, func(ctx context.Context) error { return m.podenv.RemoveUnrecorded(ctx, id) })
	}
	return err
}

func (m *Manager) hasRecord(id string) bool {
	_, pod := m.pods.Get(id)
	_, ctr := m.containers.Get(id)
	return pod || ctr
}
