package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint"
	"berth/internal/pidfd"
	"berth/shim"
)

// recover makes the objects of an earlier daemon this one's: what runs is watched
// again, what ended is published as ended, what was half made is undone, what was half
// removed is removed. Undoing goes on in the background: it may need
// plugins that take their time. When it returns, every layer that a container needs is held.
func (m *Manager) recover() error {
	if err := m.loadPodCIDR(); err != nil {
		return err
	}
	if err := m.loadPods(); err != nil {
		return err
	}
	if err := m.loadContainers(); err != nil {
		return err
	}
	if err := m.collectNetworks(); err != nil {
		return err
	}
	for _, p := range m.pods.snapshot() {
		if err := m.recoverPod(p); err != nil {
			return err
		}
	}
	for _, c := range m.containers.snapshot() {
		if err := m.recoverContainer(c); err != nil {
			return err
		}
	}
	return m.sweepTrash()
}

func (m *Manager) loadPods() error {
	damaged, err := m.podRecords.Load(func(name string, _ int, body []byte) error {
		p := &pod{id: name, turn: newTurn(), config: &runtimeapi.PodSandboxConfig{}}
		if err := json.Unmarshal(body, &p.rec); err != nil {
			return err
		}
		if err := proto.Unmarshal(p.rec.Config, p.config); err != nil {
			return err
		}
		if p.rec.ID != name || p.config.Metadata == nil {
			return errors.New("not the record of this pod")
		}
		m.pods.put(p.id, p)
		return nil
	})
	m.logDamaged("pod", damaged)
	return err
}

func (m *Manager) loadContainers() error {
	damaged, err := m.containerRecs.Load(func(name string, _ int, body []byte) error {
		c := &container{id: name, turn: newTurn(), config: &runtimeapi.ContainerConfig{}}
		if err := json.Unmarshal(body, &c.rec); err != nil {
			return err
		}
		if err := proto.Unmarshal(c.rec.Config, c.config); err != nil {
			return err
		}
		if c.rec.Resources != nil {
			c.resources = &runtimeapi.LinuxContainerResources{}
			if err := proto.Unmarshal(c.rec.Resources, c.resources); err != nil {
				return err
			}
		} else {
			c.resources = c.config.GetLinux().GetResources()
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
	if image := p.rec.PauseImage; image != nil && p.rec.Phase != removing {
		if _, err := m.images.Hold(p.id, image.Layers); err != nil {
			m.log.Error("pause image", "pod", p.id, "error", err)
		}
	}
	switch p.rec.Phase {
	case podStarting, removing: // never reported, or to go
		m.finishInBackground("undo", p.String(), func(ctx context.Context) error {
			pass, err := m.take(ctx, p.turn, "undo", p.String())
			if err != nil {
				return err
			}
			defer pass()
			return m.erasePod(ctx, p)
		})
		return nil
	case podReady:
		m.findPause(p)
	}
	sum, err := fingerprintOf(p.config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: p.rec.Handler})
	if err != nil {
		return err
	}
	m.podIDs.adopt(podIdentity(p.config.Metadata), sum, p.id)
	return nil
}

// findPause watches the pause of a pod again, or publishes the pod as not ready:
// its network is there still and goes with StopPodSandbox.
func (m *Manager) findPause(p *pod) {
	m.publishPod(p)
	if p.rec.BootID != m.bootID {
		m.stopAfterReboot(p)
		return
	}
	pause, err := pidfd.OpenVerified(p.rec.PausePID, p.rec.PauseStart)
	if err == nil {
		m.watchPause(p, pause)
		return
	}
	m.log.Warn("the pause process is gone", "pod", p.id, "error", err)
	m.publishPauseless(p)
}

// stopAfterReboot gives back the addresses of a pod that the machine's restart ended.
func (m *Manager) stopAfterReboot(p *pod) {
	m.publishPauseless(p)
	m.finishInBackground("stop", p.String(), func(ctx context.Context) error {
		pass, err := m.take(ctx, p.turn, "stop", p.String())
		if err != nil {
			return err
		}
		defer pass()
		return m.stopPod(ctx, p)
	})
}

// recoverContainer decides by phase and, where a shim was at work, by what the
// shim directory tells.
func (m *Manager) recoverContainer(c *container) error {
	if _, err := m.pods.find(c.podID); err != nil || c.rec.Phase == removing || c.rec.Process == nil {
		// Without its pod, to go, or never reported.
		m.finishInBackground("undo", c.String(), func(ctx context.Context) error { return m.removeContainer(ctx, c) })
		return nil
	}
	sum, err := fingerprintOf(c.config)
	if err != nil {
		return err
	}
	m.containerIDs.adopt(containerIdentity(c.podID, c.config.Metadata), sum, c.id)
	if _, err := m.images.Hold(c.id, c.rec.Image.Layers); err != nil {
		m.log.Error("layers of a container", "container", c.id, "image", c.rec.Image.ID, "error", err)
	}
	switch c.rec.Phase {
	case containerStarting, containerRunning:
		m.findShim(c)
	default:
		m.publishContainer(c)
	}
	return nil
}

// findShim watches the shim of a container again, or publishes how it ended.
func (m *Manager) findShim(c *container) {
	if c.rec.BootID != m.bootID {
		m.publishExit(c, exitRecord{Code: exitCodeUnknown, Reason: reasonUnknown, FinishedAt: time.Now(),
			Message: "the machine was restarted while the container ran"})
		return
	}
	ids, err := shim.ReadShim(m.shimDir(c.id))
	if err == nil {
		if run := m.openRunning(c, ids); run != nil {
			c.running.Store(run)
			c.rec.Phase = containerRunning
			m.publishContainer(c)
			m.watchContainer(c, run)
			return
		}
	}
	m.publishLostStart(c, ids, err)
}

// openRunning returns nil when the shim is gone, or never started its container.
func (m *Manager) openRunning(c *container, ids shim.Launched) *running {
	if ids.InitPID == 0 {
		return nil
	}
	shimFile, err := pidfd.OpenVerified(ids.ShimPID, ids.ShimStartTime)
	if err != nil {
		return nil
	}
	run := &running{shim: shimFile, pid: ids.InitPID, startedAt: ids.StartedAt, exited: make(chan struct{})}
	// The init may have ended while its shim has not yet: nil then, and the exit follows.
	run.init, err = pidfd.OpenVerified(ids.InitPID, ids.InitStartTime)
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		m.log.Error("open pidfd of init", "container", c.id, "error", err)
	}
	return run
}

// publishLostStart publishes a container whose shim is gone: by its exit record,
// as lost, or, if it never got to start the container, as failed to start.
func (m *Manager) publishLostStart(c *container, ids shim.Launched, shimErr error) {
	exit, err := m.readExit(c, ids.StartedAt)
	switch {
	case err == nil:
	case errors.Is(shimErr, fs.ErrNotExist) || ids.InitPID == 0:
		exit = exitRecord{Code: exitCodeStartError, Reason: reasonStartError, FinishedAt: time.Now(),
			Message: "berth was stopped while it started the container"}
	default:
		m.log.Error("the shim was lost", "container", c.id, "error", errors.Join(err, shimErr))
	}
	m.publishExit(c, exit)
	m.finishInBackground("clean up after", c.String(), func(ctx context.Context) error {
		pass, err := m.take(ctx, c.turn, "clean up after", c.String())
		if err != nil {
			return err
		}
		defer pass()
		if c.removed {
			return nil
		}
		return m.removeRuntimeState(ctx, c.id, c.rec.CgroupsPath)
	})
}

// finishInBackground does at once, and repeats until it succeeds, what an earlier
// daemon left to do.
func (m *Manager) finishInBackground(what, object string, undo func(context.Context) error) {
	m.spawn(func() {
		ctx, cancel := context.WithTimeout(m.ctx, opLimit)
		defer cancel()
		err := m.guard(what, object, func() error { return undo(ctx) })
		if err != nil {
			m.log.Warn("undo of what an earlier daemon left failed", "operation", what, "object", object, "error", err)
			m.retry(what, object, undo)
		}
	})
}

// loadPodCIDR reads the pod CIDR that kubelet told an earlier daemon.
func (m *Manager) loadPodCIDR() error {
	damaged, err := m.runtimeRecs.Load(func(_ string, _ int, body []byte) error {
		var rec runtimeRecord
		if err := json.Unmarshal(body, &rec); err != nil {
			return err
		}
		return m.setPodCIDR(rec.PodCIDR)
	})
	m.logDamaged("runtime", damaged)
	if err != nil {
		return fmt.Errorf("load runtime record: %w", err)
	}
	return nil
}
