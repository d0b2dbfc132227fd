package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/join"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/oci"
	"berth/oci/confine"
	"berth/sandbox/podenv"
	"berth/sandbox/state"
	"berth/sandbox/stats"
	shimproto "berth/shim/proto"
)

// pod is the one owner of a pod's state.
type pod struct {
	id       string
	config   *runtimeapi.PodSandboxConfig // as in rec, decoded; never changed
	updated  *runtimeapi.PodSandboxConfig // config with the resources of the last update, nil without one; belongs to the holder of turn
	turn     task.Turn
	rec      state.PodRecord                // belongs to the holder of turn
	info     atomic.Pointer[state.Pod]      // nil until the pod is ready: nobody sees half a pod
	pause    atomic.Pointer[os.File]        // pidfd, owned by the pod's watcher
	meter    atomic.Pointer[stats.PodMeter] // nil without a pause; owned by the pod's watcher
	launched atomic.Int64                   // process ID of the pause, before info has it; 0: it does not run yet, or an earlier daemon started it
	started  *trace.Trace                   // where the time of its start went; nil if an earlier daemon started it; never changed

	presented  bool // plugins were asked about it; belongs to the holder of turn
	unrecorded bool // that it is stopped is yet to be recorded, in the background; belongs to the holder of turn
	stopping   bool // it was ready, and what it has is being taken down; belongs to the holder of turn
	takenDown  bool // nothing of it is left but its files; belongs to the holder of turn
}

func (p *pod) String() string { return "pod " + p.id }
func (p *pod) Visible() bool  { return p.info.Load() != nil }

// Info implements state.Published.
func (p *pod) Info() *state.Pod { return p.info.Load() }

// Birth implements state.Published.
func (p *pod) Birth() state.Birth { return state.Birth{At: p.rec.CreatedAt, ID: p.id} } // which never changes

// PodOrPlanned returns the pod with exactly that ID. Of one that is being made it tells the config
// and, as soon as there is one, the process ID of the pause. NotFound if there is none.
func (m *Manager) PodOrPlanned(id string) (*state.Pod, error) {
	p, known := m.pods.Get(id)
	if !known {
		return nil, errdefs.NotFound("pod sandbox %q does not exist", id)
	}
	if info := p.info.Load(); info != nil {
		return info, nil
	}
	return &state.Pod{ID: p.id, Config: p.config, CreatedAt: p.rec.CreatedAt, PausePID: int(p.launched.Load())}, nil
}

// RunPodSandbox creates and starts a pod, and returns its ID when its network is up
// and its pause runs. A call with the identity and content of an existing pod, or of one
// being started, returns that one.
//
// Errors: InvalidArgument for a config that can't be, AlreadyExists for an identity in
// use with another content, NotFound for an unknown handler, FailedPrecondition without a CNI config.
func (m *Manager) RunPodSandbox(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	checking := trace.Begin(ctx, "check")
	defer checking.End() // where it fails
	if err := m.checkPodConfig(config, handler); err != nil {
		return "", err
	}
	sum, err := join.Of(config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: handler})
	if err != nil {
		return "", err
	}
	identity := state.PodIdentity(config.Metadata)
	m.launchers.ExpectPause(m.hasPlainPause(config, handler), m.cfg.SystemdCgroup)
	defer m.tasks.BeginUpTo(task.Limit, "it to be made", identity)()
	checking.End()
	id, err := m.podIDs.Create(ctx, identity, sum, join.Maker{
		Spawn:  m.tasks.Operations.Spawn,
		Make:   func() (string, error) { return m.newPod(ctx, config, handler, identity) },
		Remove: m.replacePod,
	})
	if err != nil {
		return "", fmt.Errorf("run %s: %w", identity, err)
	}
	info, err := m.Pod(id)
	if err != nil {
		return "", err
	}
	if !info.Ready {
		return "", errdefs.AlreadyExists("run %s: it exists (%s) and was stopped; remove it, or use another attempt", identity, id)
	}
	return id, nil
}

// hasPlainPause guesses whether the pod's pause will be one that makes its namespaces itself (shim/launcher/pause).
func (m *Manager) hasPlainPause(config *runtimeapi.PodSandboxConfig, handler string) bool {
	options := config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	return (handler == "" || handler == m.cfg.Handler) && m.cfg.PauseImage == "" && !m.cfg.Host.AppArmor && !m.cfg.Host.SELinux &&
		options.GetUsernsOptions().GetMode() != runtimeapi.NamespaceMode_POD
}

// checkPodConfig refuses what no later step would refuse as precisely.
func (m *Manager) checkPodConfig(config *runtimeapi.PodSandboxConfig, handler string) error {
	if err := state.CheckPod(config); err != nil {
		return err
	}
	if _, err := m.handlers.Find(handler); err != nil {
		return err
	}
	if err := state.CheckPodResources(config.GetLinux().GetOverhead(), config.GetLinux().GetResources(), *m.cfg.Host); err != nil {
		return err
	}
	return state.CheckUserNamespace(config, *m.cfg.Host)
}

// newPod runs in a goroutine of its own, whatever becomes of the caller.
func (m *Manager) newPod(caller context.Context, config *runtimeapi.PodSandboxConfig, handler, identity string) (string, error) {
	defer m.tasks.BeginUpTo(task.Limit, "run", identity)()
	ctx, release := trace.Carry(m.tasks.Operations.Context(), caller)
	defer release()
	ctx, cancel := context.WithTimeout(ctx, task.Limit)
	defer cancel()
	var p *pod
	err := m.tasks.Guard("plan", identity, func() (err error) { p, err = m.planPod(ctx, config, handler); return err })
	if err != nil {
		return "", err
	}
	err = m.tasks.Guard("run", identity, func() error {
		return m.tasks.WithTurn(ctx, p.turn, "run", p.String(), func() error { return m.bringUp(ctx, p) })
	})
	if err != nil {
		m.abandonPod(p)
		return "", err
	}
	return p.id, nil
}

// planPod writes down what is about to exist.
func (m *Manager) planPod(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (*pod, error) {
	ctx, span := trace.Nest(ctx, "plan")
	defer span.End()
	data, err := proto.Marshal(config)
	if err != nil {
		return nil, errdefs.InvalidArgument("encode pod config: %w", err)
	}
	p := &pod{id: state.NewID(), config: config, turn: task.NewTurn(), started: trace.Of(ctx)}
	p.rec = state.PodRecord{ID: p.id, BootID: m.bootID, RunID: m.run.ID, Phase: state.PodStarting, CreatedAt: m.podCreation(config.GetMetadata()), Config: data,
		Handler: handler, Tmpfs: true}
	p.rec.CgroupsPath, err = oci.CgroupsPath(config.GetLinux().GetCgroupParent(), p.id, m.cfg.SystemdCgroup)
	if err != nil {
		return nil, err
	}
	if p.rec.Runtime, err = m.planRuntime(ctx, p, handler); err != nil {
		return nil, err
	}
	if !state.HostNetwork(config) {
		p.rec.NetNS = m.dirs.NetNS(p.id)
		if err := m.networks.Plan(&p.rec, config); err != nil {
			return nil, err
		}
	}
	if m.cfg.PauseImage != "" {
		if p.rec.PauseImage, err = m.roots.PauseImage(ctx, m.cfg.PauseImage); err != nil {
			return nil, err
		}
	}
	options := config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	if p.rec.SELinux, err = m.labels.Draw(m.selinux, options, confine.Labels{}, *m.cfg.Host, p.id); err != nil {
		return nil, err
	}
	if err := m.writePod(ctx, p); err != nil {
		m.labels.Release(m.selinux, p.rec.SELinux, p.id)
		return nil, err
	}
	m.pods.Put(p.id, p)
	return p, nil
}

// bringUp makes everything the pod needs and publishes it. It needs the pod's turn.
func (m *Manager) bringUp(ctx context.Context, p *pod) error {
	pause, err := m.podenv.Make(ctx, p.onHost())
	if err != nil {
		return err
	}
	return m.finishPod(ctx, p, pause)
}

// onHost is the pod as what it has on the host is made from. It needs the pod's turn.
func (p *pod) onHost() podenv.Pod {
	return podenv.Pod{Rec: &p.rec, Config: p.config, Pause: p.pause.Load(), Launched: func(pid int) { p.launched.Store(int64(pid)) }}
}

// finishPod presents the pod to plugins, records that it is ready, publishes it and watches its pause.
func (m *Manager) finishPod(ctx context.Context, p *pod, started *shimproto.Started) error {
	p.rec.PausePID, p.rec.PauseStart = started.InitPID, started.InitStartTime
	p.rec.Phase = state.PodReady
	release, err := m.presentPod(ctx, p)
	defer release()
	if err == nil {
		err = m.podenv.FinishFiles(ctx, p.onHost())
	}
	if err == nil {
		err = m.writePod(ctx, p)
	}
	if err != nil {
		return errors.Join(err, started.Init.Close())
	}
	defer trace.Begin(ctx, "publish").End()
	m.publishPod(p)
	m.watchPause(p, started.Init)
	m.logPod("pod ready", p, slog.Any("ips", p.rec.IPs), seconds(time.Since(p.rec.CreatedAt)))
	return nil
}

// writePod writes the record of a pod that is being started.
func (m *Manager) writePod(ctx context.Context, p *pod) error {
	defer trace.Begin(ctx, "record").End()
	return m.podRecords.Write(p.id, p.rec)
}

// publishPod makes the record visible. The caller has the pod's turn.
func (m *Manager) publishPod(p *pod) {
	info := p.snapshot()
	m.events.PodChanged(p.info.Swap(info), info)
}

// snapshot is what the record says. The caller has the pod's turn.
func (p *pod) snapshot() *state.Pod { return state.NewPod(&p.rec, p.shownConfig()) }

// watchPause owns the pause's pidfd: the pod stops being ready when it ends.
func (m *Manager) watchPause(p *pod, pause *os.File) {
	p.pause.Store(pause)
	measured := m.podMeter(p)
	p.meter.Store(measured)
	started := m.tasks.Watchers.Spawn(func() {
		ended := m.processes.AwaitEnd(pause, "pause of pod "+p.id)
		m.closePause(p, pause, measured)
		if ended {
			m.pauseEnded(p)
		}
	})
	if !started {
		m.closePause(p, pause, measured)
	}
}

func (m *Manager) closePause(p *pod, pause *os.File, measured *stats.PodMeter) {
	p.pause.Store(nil)
	p.meter.Store(nil)
	if err := errors.Join(pause.Close(), measured.Close()); err != nil {
		m.log.Warn("close pidfd and statistics of pause", "pod", p.id, "error", err)
	}
}

// pauseEnded publishes that a pod lost its pause. What it has on the host is taken
// away by StopPodSandbox, which kubelet calls when it sees the pod NotReady.
func (m *Manager) pauseEnded(p *pod) {
	_ = m.tasks.WithTurn(m.tasks.Watchers.Context(), p.turn, "note the end of its pause", p.String(), func() error {
		if p.rec.Phase == state.PodReady { // else stopped on purpose
			m.log.Warn("the pause process ended, the pod is not ready any more", "pod", p.id)
			m.publishPauseless(p)
		}
		return nil
	}) // fails only when the daemon is ending
}

// publishPauseless makes visible that the pod is not ready, before it is stopped.
func (m *Manager) publishPauseless(p *pod) {
	p.rec.PausePID, p.rec.PauseStart = 0, 0
	info := p.info.Load().Pauseless()
	m.events.PodChanged(p.info.Swap(info), info)
}

// abandonPod undoes a pod that could not be started. It has its own time, in which a DEL may hang as long as the ADD before it: the
// operation's may be used up. What can't be undone now is tried again and again.
func (m *Manager) abandonPod(p *pod) {
	p.launched.Store(0) // the pause ends, and its process ID may become another process's
	undo := func(ctx context.Context) error {
		return m.tasks.WithTurn(ctx, p.turn, "undo", p.String(), func() error { return m.erasePod(ctx, p) })
	}
	ctx, cancel := context.WithTimeout(m.tasks.Operations.Context(), task.Limit)
	defer cancel()
	if err := m.tasks.Guard("undo", p.String(), func() error { return undo(ctx) }); err != nil {
		m.log.Error("undo of a pod that did not start", "pod", p.id, "error", err)
		m.tasks.InBackground("undo", p.String(), undo)
	}
}
