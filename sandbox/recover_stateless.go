package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"berth/internal/pidfd"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// A node inside a container (kind, LXC, nspawn) restarts with the same boot ID. Its state directory
// is then empty and its processes are gone. An operator may also empty the directory of a running
// node, or mount over it, while processes continue. The ID of the state directory reveals both
// cases. Recovery handles them like a reboot, after it has killed surviving processes.

// stateLost reports whether an object of a boot and a run has lost its runtime state. If a shim
// directory of one of ids exists, only the ID file was deleted.
func (r *recovery) stateLost(bootID, runID string, ids ...string) (bool, error) {
	if bootID != r.m.bootID {
		return true, nil
	}
	if !r.m.run.New && r.m.run.Has(runID) {
		return false, nil
	}
	for _, id := range ids {
		if has, err := r.m.node.HasState(id); has || err != nil {
			return false, err
		}
	}
	return true, nil
}

// markPod adds the run to the record of an earlier version, so that the next restart is noticed.
func (r *recovery) markPod(p lockedPod) {
	if p.RunID == r.m.run.ID || r.m.run.ID == "" {
		return
	}
	p.RunID = r.m.run.ID
	if err := r.m.records.WritePod(p.PodSpec, p.PodStatus); err != nil {
		r.m.log.Warn("record the state directory's ID; the next daemon will retry", "pod", p.ID, "error", err)
	}
}

// markContainer is markPod for a container.
func (r *recovery) markContainer(c lockedContainer) {
	if c.RunID == r.m.run.ID || r.m.run.ID == "" {
		return
	}
	c.RunID = r.m.run.ID
	if err := r.m.records.WriteContainer(c.ContainerSpec, c.ContainerStatus); err != nil {
		r.m.log.Warn("record the state directory's ID; the next daemon will retry", "container", c.ID, "error", err)
	}
}

// exitOfRestart returns the exit of a container whose node was restarted.
func exitOfRestart(c lockedContainer) state.Exit {
	return state.Exit{
		Code:       state.CodeUnknown,
		Reason:     state.ReasonUnknown,
		StartedAt:  c.StartedAt,
		FinishedAt: time.Now(),
		Message:    "the node was restarted",
	}
}

// exitOfStateLost returns the exit of a container whose state was lost during the same boot.
func exitOfStateLost(c lockedContainer) state.Exit {
	exit := exitOfRestart(c)
	exit.Message = "the node was restarted, or its state directory was emptied"
	return exit
}

// openPause returns the pidfd of a pod's recorded pause. The error wraps os.ErrProcessDone if the
// pause has exited.
func openPause(p lockedPod) (*os.File, error) {
	if p.PausePID == 0 { // the pause had exited when the record was written
		return nil, os.ErrProcessDone
	}
	return pidfd.OpenVerified(p.PausePID, p.PauseStart)
}

// recoverStateless publishes a pod without runtime state as not ready, and schedules its stop,
// which releases its addresses. The stop kills a surviving pause first. The kernel then kills the
// other processes of a shared PID namespace.
func (r *recovery) recoverStateless(p lockedPod) error {
	var pause *os.File
	if p.BootID == r.m.bootID {
		var err error
		pause, err = openPause(p)
		if err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		r.m.log.Warn("the runtime state of a pod is gone: the node was restarted, or its state directory was emptied", "pod",
			p.ID, "runs", pause != nil)
	}
	if err := r.m.publishPauseless(p); err != nil {
		return err
	}
	r.m.deferWithPod("stop", p.pod, func(ctx context.Context, p lockedPod) error {
		return errors.Join(r.endLostPause(ctx, p, &pause), r.m.stopPod(ctx, p))
	})
	return nil
}

// endLostPause kills the pause of a pod without runtime state. It may be repeated.
func (r *recovery) endLostPause(ctx context.Context, p lockedPod, pause **os.File) error {
	if *pause == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, runtime.KillTimeout)
	defer cancel()
	if err := r.m.processes.End(ctx, *pause); err != nil {
		return fmt.Errorf("end the pause of pod %s: %w", p.ID, err)
	}
	err := (*pause).Close()
	*pause = nil
	return err
}

// publishStateless kills the surviving processes of a container without runtime state and publishes
// it as exited. A container with a surviving process stays Running until that process exits.
func (r *recovery) publishStateless(ctx context.Context, c lockedContainer) error {
	exit := exitOfStateLost(c)
	if err := r.m.processes.KillLeftBehind(ctx, c.ID, c.CgroupsPath); err != nil {
		r.m.log.Error("processes of a container without runtime state survive SIGKILL", "container", c.ID, "error", err)
		return r.watchLost(c, proto.PIDs{StartedAt: c.StartedAt}, exit)
	}
	exit.FinishedAt = time.Now()
	r.m.exited(c, exit)
	return nil
}
