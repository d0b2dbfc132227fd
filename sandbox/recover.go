package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint"
	"berth/internal/join"
	"berth/internal/pidfd"
	"berth/internal/task"
	"berth/sandbox/request"
	"berth/shim"
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
	if err := m.collectNetworks(ctx); err != nil {
		return err
	}
	for _, p := range m.pods.snapshot() {
		if err := m.recoverPod(p); err != nil {
			return fmt.Errorf("recover pod %s: %w", p.id, err)
		}
	}
	for _, c := range m.containers.snapshot() {
		if err := m.recoverContainer(ctx, c); err != nil {
			return fmt.Errorf("recover container %s: %w", c.id, err)
		}
	}
	if err := m.removeUnrecorded(); err != nil {
		return err
	}
	if err := m.trash.Sweep(); err != nil {
		return err
	}
	if err := m.plugins.Start(ctx, managerForPlugins{m}); err != nil {
		return err
	}
	for _, start := range m.unfinished {
		start()
	}
	m.unfinished = nil
	return nil
}

// later does in the background what recover found half done, as soon as all
// objects are found: it takes turns, and recover does not.
func (m *Manager) later(what, object string, do func(context.Context) error) {
	m.unfinished = append(m.unfinished, func() { m.tasks.InBackground(what, object, do) })
}

func (m *Manager) loadPods() error {
	damaged, err := m.podRecords.Load(func(name string, _ int, body []byte) error {
		p := &pod{id: name, turn: task.NewTurn(), config: &runtimeapi.PodSandboxConfig{}}
		if err := json.Unmarshal(body, &p.rec); err != nil {
			return err
		}
		if err := proto.Unmarshal(p.rec.Config, p.config); err != nil {
			return err
		}
		if p.rec.ID != name || p.config.Metadata == nil {
			return errors.New("not the record of this pod")
		}
		if err := p.loadResources(); err != nil {
			return err
		}
		m.pods.put(p.id, p)
		return nil
	})
	m.logDamaged("pod", damaged)
	return err
}

func (m *Manager) loadContainers() error {
	damaged, err := m.containerRecs.Load(func(name string, _ int, body []byte) error {
		c := &container{id: name, turn: task.NewTurn(), config: &runtimeapi.ContainerConfig{}}
		if err := json.Unmarshal(body, &c.rec); err != nil {
			return err
		}
		if err := proto.Unmarshal(c.rec.Config, c.config); err != nil {
			return err
		}
		c.resources = c.config.GetLinux().GetResources()
		if c.rec.Resources != nil {
			c.resources = &runtimeapi.LinuxContainerResources{}
			if err := proto.Unmarshal(c.rec.Resources, c.resources); err != nil {
				return err
			}
		}
		if c.rec.ID != name || c.config.Metadata == nil {
			return errors.New("not the record of this container")
		}
		c.podID = c.rec.PodID
		m.containers.put(c.id, c)
		return nil
	})
	m.logDamaged("container", damaged)
	return err
}

func (m *Manager) logDamaged(kind string, damaged []checkpoint.Damaged) {
	for _, d := range damaged {
		m.log.Error("a record can't be trusted and was set aside", "kind", kind, "id", d.Name, "path", d.Path, "error", d.Err)
	}
}

// recoverPod decides by phase. No turn is needed: nobody else knows the manager yet.
func (m *Manager) recoverPod(p *pod) error {
	if p.rec.Phase == podStarting || p.rec.Phase == removing { // never reported, or to go
		m.later("undo", p.String(), func(ctx context.Context) error {
			return m.tasks.WithTurn(ctx, p.turn, "undo", p.String(), func() error { return m.erasePod(ctx, p) })
		})
		return nil
	}
	sum, err := join.Of(p.config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: p.rec.Handler})
	if err != nil {
		return err
	}
	m.podIDs.Adopt(request.PodIdentity(p.config.Metadata), sum, p.id)
	if image := p.rec.PauseImage; image != nil {
		if _, err := m.images.Hold(p.id, image.Layers); err != nil {
			m.log.Error("pause image", "pod", p.id, "error", err)
		}
	}
	m.publishPod(p)
	switch {
	case p.rec.Phase == podReady && p.rec.BootID == m.bootID:
		return m.findPause(p)
	case p.rec.Phase == podReady: // the machine was restarted: give its addresses back
		m.publishPauseless(p)
	case p.rec.Phase != podStopped:
		return fmt.Errorf("its record has the unknown phase %q", p.rec.Phase)
	}
	m.later("stop", p.String(), func(ctx context.Context) error { // perhaps it was half done
		return m.tasks.WithTurn(ctx, p.turn, "stop", p.String(), func() error { return m.stopPod(ctx, p) })
	})
	return nil
}

// findPause watches the pause of a pod again, or publishes the pod as not ready:
// its network is there still and goes with StopPodSandbox.
func (m *Manager) findPause(p *pod) error {
	pause, err := pidfd.OpenVerified(p.rec.PausePID, p.rec.PauseStart)
	if errors.Is(err, os.ErrProcessDone) {
		m.log.Warn("the pause process is gone", "pod", p.id)
		m.publishPauseless(p)
		return nil
	}
	if err != nil {
		return err
	}
	m.watchPause(p, pause)
	return nil
}

// recoverContainer decides by phase and, where a shim was at work, by what the
// shim directory tells.
func (m *Manager) recoverContainer(ctx context.Context, c *container) error {
	if _, known := m.pods.get(c.podID); !known || c.rec.Phase == removing || c.rec.Process == nil {
		// Without its pod, to go, or never reported.
		m.later("undo", c.String(), func(ctx context.Context) error { return m.removeContainer(ctx, c) })
		return nil
	}
	sum, err := join.Of(c.config)
	if err != nil {
		return err
	}
	m.containerIDs.Adopt(request.ContainerIdentity(c.podID, c.config.Metadata), sum, c.id)
	if _, err := m.images.Hold(c.id, c.rec.Image.Layers); err != nil {
		m.log.Error("layers of a container", "container", c.id, "image", c.rec.Image.ID, "error", err)
	}
	if _, err := m.holdVolumes(c); err != nil {
		m.log.Error("layers of a container's image volumes", "container", c.id, "error", err)
	}
	switch {
	case c.rec.Phase == containerExited:
		m.publishContainer(c)
		m.later("clean up after", c.String(), func(ctx context.Context) error { // perhaps it was not
			return m.tasks.WithTurn(ctx, c.turn, "clean up after", c.String(), func() error {
				if c.removed {
					return nil
				}
				return m.removeRuntimeState(ctx, c.id, c.rec.CgroupsPath)
			})
		})
		return nil
	case c.rec.BootID != m.bootID:
		m.exited(c, exitRecord{Code: exitCodeUnknown, Reason: reasonUnknown, StartedAt: c.rec.StartedAt, FinishedAt: time.Now(),
			Message: "the machine was restarted"})
		return nil
	case c.rec.Phase == containerCreated:
		m.publishContainer(c)
		return nil
	case c.rec.Phase != containerStarting && c.rec.Phase != containerRunning:
		return fmt.Errorf("its record has the unknown phase %q", c.rec.Phase)
	}
	return m.findShim(ctx, c)
}

// findShim watches the shim of a container again, or publishes how it ended.
func (m *Manager) findShim(ctx context.Context, c *container) error {
	shimFile, ids, err := m.openShim(ctx, c)
	if err != nil {
		return err
	}
	if shimFile == nil {
		return m.publishLost(ctx, c, ids)
	}
	run := &running{shim: shimFile, pid: ids.InitPID, startedAt: ids.StartedAt, exited: make(chan struct{}),
		meter: m.containerMeter(c)}
	// An init that has ended is no trouble: the shim is about to tell.
	run.init, err = pidfd.OpenVerified(ids.InitPID, ids.InitStartTime)
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return errors.Join(err, shimFile.Close())
	}
	c.running.Store(run)
	c.rec.Phase = containerRunning
	m.publishContainer(c)
	m.watchContainer(c, run)
	return nil
}

// handoverLimit is how long a launcher of an earlier daemon may take to become a
// monitor, or to notice that its daemon is gone and undo the launch.
const handoverLimit = 15 * time.Second

// openShim returns the pidfd of a container's monitor, nil if there is none. A
// launcher that is still at work is waited for: its launch ends one way or the other.
func (m *Manager) openShim(ctx context.Context, c *container) (*os.File, shim.Launched, error) {
	ctx, cancel := context.WithTimeout(ctx, handoverLimit)
	defer cancel()
	for {
		ids, err := shim.ReadShim(m.dirs.Shim(c.id))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, ids, nil
		}
		if err != nil {
			return nil, ids, err
		}
		f, err := pidfd.OpenVerified(ids.ShimPID, ids.ShimStartTime)
		if errors.Is(err, os.ErrProcessDone) {
			return nil, ids, nil
		}
		if err != nil {
			return nil, ids, err
		}
		if ended, err := pidfd.Exited(f); ended || err != nil { // a zombie, where nobody reaps
			return nil, ids, errors.Join(err, f.Close())
		}
		// A launcher is executed from a sealed copy in memory, a monitor from its file.
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", ids.ShimPID))
		if err == nil && !strings.HasPrefix(exe, "/memfd:") && ids.InitPID != 0 {
			return f, ids, nil
		}
		waiting := m.tasks.Sleep(ctx, 5*time.Millisecond, "the launcher of an earlier daemon", c.String())
		if !waiting {
			m.log.Error("the launcher of an earlier daemon does not end, it is killed", "container", c.id, "pid", ids.ShimPID)
			err = pidfd.Signal(f, unix.SIGKILL)
		} else {
			err = nil
		}
		if err := errors.Join(err, f.Close()); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return nil, ids, err
		}
		if !waiting {
			return nil, ids, nil
		}
	}
}

// publishLost publishes a container whose shim is gone: by its exit record, as
// lost, or, if it never got to start the container, as created.
func (m *Manager) publishLost(ctx context.Context, c *container, ids shim.Launched) error {
	startedAt := ids.StartedAt
	if startedAt.IsZero() {
		startedAt = c.rec.StartedAt
	}
	ctx, cancel := context.WithTimeout(ctx, handoverLimit)
	defer cancel()
	exit, lost, err := m.readExit(ctx, c, startedAt)
	if err != nil {
		return err
	}
	if lost && ids.InitPID == 0 {
		if err = m.takeStartBack(ctx, c); err == nil {
			return nil
		}
		m.log.Error("take the start of a container back", "container", c.id, "error", err)
		exit = exitRecord{Code: exitCodeStartError, Reason: reasonStartError, FinishedAt: time.Now(),
			Message: "berth was stopped while it started the container"}
	}
	if lost {
		if err := m.killLeftBehind(ctx, c); err != nil {
			m.log.Error("what a lost shim left does not end", "container", c.id, "error", err)
		}
	}
	m.exited(c, exit)
	return nil
}

// takeStartBack makes a container created again that an earlier daemon was about to start, so that the start
// can be tried again: who asked for it was not told that it failed. Its launcher has undone what it did, or was lost. A
// command that ran for the moment until the launcher noticed that its daemon was gone runs once more, as it would if kubelet
// made the container anew.
func (m *Manager) takeStartBack(ctx context.Context, c *container) error {
	if err := m.removeRuntimeState(ctx, c.id, c.rec.CgroupsPath); err != nil {
		return err
	}
	c.rec.Phase, c.rec.StartedAt = containerCreated, time.Time{}
	if err := m.containerRecs.Write(c.id, c.rec); err != nil {
		m.log.Warn("record that a start was taken back; the next daemon will do it once more", "container", c.id, "error", err)
	}
	m.publishContainer(c)
	return nil
}
