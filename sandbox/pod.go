package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/oci"
	"berth/oci/confine"
	"berth/sandbox/state"
	"berth/sandbox/stats"
	"berth/shim/proto"
)

// PodOrPlanned returns the pod with exactly that ID, even before it is published. A starting pod
// has its config and, once the pause runs, PausePID. The error is NotFound for an unknown ID.
func (m *Manager) PodOrPlanned(id string) (*state.Pod, error) {
	p, known := m.objects.pods.Get(id)
	if !known {
		return nil, errdefs.NotFound("pod sandbox %q does not exist", id)
	}
	if info := p.info.Load(); info != nil {
		return info, nil
	}
	planned := &state.Pod{PodSpec: p.PodSpec, PodStatus: state.NewPodStatus(state.PodStarting)}
	planned.PausePID = int(p.launched.Load())
	return planned, nil
}

// RunPodSandbox creates and starts a pod. It returns the ID when the network is up and the pause
// runs. A call with the identity and content of an existing pod joins its start, or returns its ID.
//
// Errors: InvalidArgument for a malformed config. AlreadyExists if the identity exists with other
// content. NotFound for an unknown handler. FailedPrecondition if there is no CNI config.
func (m *Manager) RunPodSandbox(
	ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string,
) (string, error) {
	checking := trace.Begin(ctx, "check")
	defer checking.End() // after an error
	if err := m.checkPodConfig(config, handler); err != nil {
		return "", err
	}
	sum, err := fingerprintOf(config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: handler})
	if err != nil {
		return "", err
	}
	identity := state.PodIdentity(config.Metadata)
	defer m.tasks.BeginUpTo(task.Timeout, "concurrent creation", identity)()
	checking.End()
	id, err := m.podIDs.Create(ctx, identity, sum, maker{
		Spawn:  m.tasks.Operations.Spawn,
		Make:   func() (string, error) { return m.createPod(ctx, config, handler, identity) },
		Remove: m.replacePod,
	})
	if err != nil {
		return "", fmt.Errorf("run %s: %w", identity, err)
	}
	info, err := m.Pod(id)
	if err != nil {
		return "", err
	}
	if !info.Ready() {
		return "", errdefs.AlreadyExists("run %s: pod sandbox %s exists and was stopped; remove it, or use another attempt",
			identity, id)
	}
	return id, nil
}

// checkPodConfig rejects configs before the pod is planned, while errors can name the field.
func (m *Manager) checkPodConfig(config *runtimeapi.PodSandboxConfig, handler string) error {
	if err := state.CheckPod(config); err != nil {
		return err
	}
	if _, err := m.handlers.Find(handler); err != nil {
		return err
	}
	linux := config.GetLinux()
	if err := state.CheckPodResources(linux.GetOverhead(), linux.GetResources(), m.node.Host); err != nil {
		return err
	}
	return state.CheckUserNamespace(config, m.node.Host)
}

// createPod creates a pod. It runs in a separate goroutine and continues when the caller leaves.
func (m *Manager) createPod(caller context.Context, config *runtimeapi.PodSandboxConfig,
	handler, identity string) (string, error) {
	defer m.tasks.BeginUpTo(task.Timeout, "run", identity)()
	ctx, release := trace.Carry(m.tasks.Operations.Context(), caller)
	defer release()
	ctx, cancel := context.WithTimeout(ctx, task.Timeout)
	defer cancel()
	var p *pod
	plan := podPlan{id: state.NewID(), config: config, handler: handler}
	if err := m.settleEarlier(ctx, config.Metadata); err != nil {
		return "", err
	}
	err := m.tasks.Guard("plan", identity, func() (err error) { p, err = m.planPod(ctx, plan); return err })
	if err != nil {
		return "", err
	}
	err = m.tasks.Guard("run", identity, func() error {
		return m.control.lockPod(ctx, p, "run", func(p lockedPod) error { return m.bringUp(ctx, p) })
	})
	if err != nil {
		m.abandonPod(p)
		return "", err
	}
	return p.ID, nil
}

// podPlan is a pod to create.
type podPlan struct {
	id        string
	config    *runtimeapi.PodSandboxConfig
	handler   string
	restoring bool           // its containers continue a checkpoint
	restore   *state.Restore // the part of the checkpoint that its sandbox continues; nil: none
	ips       []netip.Addr   // addresses to get if they are free
}

// planPod decides the pod's Spec, records it, and adds the pod to m.objects.pods.
func (m *Manager) planPod(ctx context.Context, plan podPlan) (_ *pod, err error) {
	ctx, span := trace.Nest(ctx, "plan")
	defer span.End()
	undo := cleanup.New()
	defer undo.Run(&err)
	id, config := plan.id, plan.config
	spec := &state.PodSpec{
		ID:        id,
		BootID:    m.bootID,
		CreatedAt: m.objects.podCreation(config.GetMetadata()),
		Config:    config,
		Handler:   plan.handler,
		Restore:   plan.restore,
		Tmpfs:     true,
	}
	if spec.CgroupsPath, err = m.node.CgroupsPath(config.GetLinux().GetCgroupParent(), id); err != nil {
		return nil, err
	}
	if spec.Mappings, err = oci.UserNamespace(config); err != nil {
		return nil, err
	}
	if spec.Runtime, err = m.planRuntime(ctx, spec, plan.handler); err != nil {
		return nil, err
	}
	p := newPod(spec, state.NewPodStatus(state.PodStarting), m.starts.history.Record(historyPod(spec)))
	p.start.AddPod(trace.Of(ctx))
	status := p.status.Unshared()
	status.RunID, status.Restoring = m.run.ID, plan.restoring
	if !state.HostNetwork(config) {
		spec.NetNS = m.node.NetNS(id)
		attachment, ranges, err := m.network.Plan(spec)
		if err != nil {
			return nil, err
		}
		status.Network, spec.IPRanges, spec.PreferredIPs = &attachment, ranges, plan.ips
	}
	if m.cfg.PauseImage != "" {
		if spec.PauseImage, err = m.volumes.PauseImage(ctx, m.cfg.PauseImage); err != nil {
			return nil, err
		}
	}
	options := config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	if spec.Labels, err = m.labels.Draw(m.selinux, options, confine.Labels{}, m.node.Host, id); err != nil {
		return nil, err
	}
	undo.Add("release SELinux labels", func() error { m.labels.Release(m.selinux, spec.Labels, id); return nil })
	if spec.Pause, p.planned, err = m.launcher.PlanPause(ctx, p.unshared().snapshot()); err != nil {
		return nil, err
	}
	m.pool.ExpectPause(spec.Pause)
	if err := m.writePod(ctx, p.unshared()); err != nil {
		return nil, err
	}
	undo.Release()
	m.objects.pods.Put(id, p)
	return p, nil
}

// bringUp makes everything that the pod needs, and publishes the pod.
func (m *Manager) bringUp(ctx context.Context, p lockedPod) error {
	if err := m.podenv.Make(ctx, p.PodSpec); err != nil {
		return err
	}
	pause, err := m.connectAndLaunch(ctx, p)
	if err != nil {
		return err
	}
	return m.finishPod(ctx, p, pause)
}

// connectAndLaunch attaches the pod to its network and launches its pause. The two run in parallel
// if the pause does not depend on the network.
func (m *Manager) connectAndLaunch(ctx context.Context, p lockedPod) (pause *proto.Started, err error) {
	group, gctx := errgroup.WithContext(ctx)
	if needsNetwork(p.PodSpec) {
		group.SetLimit(1) // sequentially
	}
	snapshot, planned := p.snapshot(), p.planned
	p.planned = nil
	group.Go(func() error {
		return m.tasks.Guard("attach network", p.String(), func() (err error) {
			p.IPs, err = m.network.Attach(gctx, p.PodSpec, p.Network)
			return err
		})
	})
	group.Go(func() error {
		return m.tasks.Guard("launch pause", p.String(), func() (err error) {
			if pause, err = m.launcher.Pause(gctx, snapshot, planned); err == nil {
				p.launched.Store(int64(pause.InitPID))
			}
			return err
		})
	})
	if err = group.Wait(); err != nil && pause != nil {
		err = errors.Join(err, pause.Init.Close())
	}
	return pause, err
}

// needsNetwork reports whether the launch of the pause needs the pod's network. A sandboxing
// runtime takes over the addresses of the namespace. Sysctls of the pod may belong to an interface
// (net.ipv4.conf.eth0.arp_ignore).
func needsNetwork(spec *state.PodSpec) bool {
	return spec.Sandboxed() || oci.SetsNetworkSysctls(spec.Config)
}

// finishPod presents the pod to NRI plugins, records that it is ready, publishes it and watches its
// pause.
func (m *Manager) finishPod(ctx context.Context, p lockedPod, started *proto.Started) error {
	p.PausePID, p.PauseStart = started.InitPID, started.InitStartTime
	if err := p.Move(state.PodReady); err != nil {
		return errors.Join(err, started.Init.Close())
	}
	release, err := m.plugins.PresentPod(ctx, p)
	defer release()
	if err == nil {
		err = m.podenv.FinishFiles(ctx, p.PodSpec, p.IPs)
	}
	if err == nil {
		err = m.writePod(ctx, p)
	}
	if err != nil {
		return errors.Join(err, started.Init.Close())
	}
	defer trace.Begin(ctx, "publish").End()
	m.control.publishPod(p)
	m.watchPause(p.pod, started.Init)
	m.events.Pod("pod ready", p.pod, slog.Any("ips", p.IPs), seconds(time.Since(p.CreatedAt)))
	return nil
}

// writePod writes the record of a pod that is being started.
func (m *Manager) writePod(ctx context.Context, p lockedPod) error {
	defer trace.Begin(ctx, "record").End()
	return m.records.WritePod(p.PodSpec, p.PodStatus)
}

// watchPause owns the pause's pidfd. When the pause exits, the pod is not ready any more.
func (m *Manager) watchPause(p *pod, pause *os.File) {
	p.pause.Store(pause)
	measured := m.meters.openPod(p)
	p.meter.Store(measured)
	started := m.tasks.Watchers.Spawn(func() {
		ended := m.processes.AwaitEnd(pause, "pause of pod "+p.ID)
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
		m.log.Warn("close pidfd and statistics of a pause", "pod", p.ID, "error", err)
	}
}

// pauseEnded publishes that a pod lost its pause. kubelet sees the pod NotReady and calls
// StopPodSandbox, which removes its network.
func (m *Manager) pauseEnded(p *pod) {
	_ = m.control.lockPod(m.tasks.Watchers.Context(), p, "publish the exit of its pause", func(p lockedPod) error {
		if p.Phase() != state.PodReady { // stopped by a client
			return nil
		}
		m.cfg.Observer.PauseExited()
		m.log.Warn("the pause exited, the pod is not ready any more", "pod", p.ID)
		return m.publishPauseless(p)
	}) // fails only during shutdown
}

// publishPauseless publishes that the pod has no pause. StopPodSandbox removes its network.
func (m *Manager) publishPauseless(p lockedPod) error {
	if err := p.Move(state.PodNotReady); err != nil {
		return err
	}
	p.PausePID, p.PauseStart = 0, 0
	m.control.publishPod(p)
	return nil
}
