package shim

import (
	"time"

	"berth/internal/cgroup"
	"berth/shim/proto"
)

const (
	// expectTime is how long a launch stays expected after Expect. expectNext is the same after a
	// container's launch, because kubelet continues with the pod's next container. Each 100 ms take
	// 2 ms of CPU time.
	expectTime = 100 * time.Millisecond
	expectNext = 25 * time.Millisecond
	// expectPace is shorter than an RCU grace period.
	expectPace = 5 * time.Millisecond
)

// Expect announces a launch within the next 100 ms. It returns at once. It is optional, and makes
// the launch faster by 5 to 20 ms. A Launch announces the next launches itself.
//
// On cgroup v1, moving a process between cgroups waits for an RCU grace period unless another move
// happened just before. While a launch is expected, an idle launcher is moved to its own cgroup
// again and again (cgroup.Anchor), so that the launch does not wait.
func (l *Launchers) Expect() { l.expect() }

// expect is Expect. The caller calls done after the launch; that shortens the wait for the next
// one.
func (l *Launchers) expect() (done func()) {
	until := time.Now().Add(expectTime) // with its monotonic reading: the clock may be set
	l.expectUntil.Store(&until)
	if l.expecting.CompareAndSwap(false, true) {
		l.owned.Go(l.keepMovesFast)
	}
	return func() {
		next := time.Now().Add(expectNext)
		l.expectUntil.CompareAndSwap(&until, &next)
	}
}

// ExpectPause announces the launch of a pause. A plain one may not move between cgroups. Then
// ExpectPause does nothing: the first move
// makes all changes of cgroups wait, including the creation of the pause's. Launch announces the
// containers that follow.
func (l *Launchers) ExpectPause(kind proto.PauseKind, systemd bool) {
	if kind != proto.PlainPause || !cgroup.MovesItself(systemd) {
		l.Expect()
	}
}

func (l *Launchers) keepMovesFast() {
	defer l.expecting.Store(false) // an Expect at this moment has no effect; the launch is only slower
	var moved int                  // pid of the last moved launcher
	var stay *cgroup.Anchor
	for time.Now().Before(*l.expectUntil.Load()) {
		if pid := l.idlePID(); pid != 0 {
			var err error
			if pid != moved {
				stay, err = cgroup.AnchorOf(pid)
				moved = pid
			}
			if err == nil {
				err = stay.Move()
			}
			if err != nil {
				l.cfg.Log.Debug("prepare the kernel for a launch", "error", err)
				return
			}
		}
		select {
		case <-l.ctx.Done():
			return
		case <-time.After(expectPace):
		}
	}
}

// idlePID returns the pid of the launcher that has been idle longest, or 0.
func (l *Launchers) idlePID() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle) == 0 || l.closed {
		return 0
	}
	return l.idle[0].pid
}
