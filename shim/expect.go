package shim

import (
	"time"

	"berth/internal/cgroup"
)

const (
	// expectTime is how long after an Expect a launch is still expected, and expectNext how long after a container's launch the next one is: kubelet
	// goes on with the pod's next container. Each 100 ms take 2 ms of CPU.
	expectTime = 100 * time.Millisecond
	expectNext = 25 * time.Millisecond
	// expectPace is shorter than a grace period.
	expectPace = 5 * time.Millisecond
)

// Expect says that a launch will follow within a tenth of a second. It returns at
// once and is never needed: it makes the launch faster, by 5 to 20 ms. A Launch says
// so for those that follow it.
//
// While a launch is expected, the kernel's lock of moves between cgroups is taken again and again, for some microseconds each, by
// moving an idle launcher to the cgroup that it is in (cgroup.Anchor). So the wait for it is over when it matters.
func (l *Launchers) Expect() { l.expect() }

// expect is Expect. The function returned says that the launch is done; it matters if nobody expects another one.
func (l *Launchers) expect() (done func()) {
	until := time.Now().Add(expectTime) // with its monotonic reading: the clock may be set
	l.expectUntil.Store(&until)
	if l.expecting.CompareAndSwap(false, true) {
		l.owned.Go(l.keepLockFast)
	}
	return func() {
		next := time.Now().Add(expectNext)
		l.expectUntil.CompareAndSwap(&until, &next)
	}
}

// ExpectPause is Expect for a pause, which comes at once. A plain one, of the built-in runtime without security labels or user namespace, may need no such
// lock; then it does nothing: who takes the lock for the first time has all changes of cgroups wait for it, also the making of the pause's. The
// container that comes next is expected when the pause runs.
func (l *Launchers) ExpectPause(plain, systemd bool) {
	if !plain || !cgroup.MovesItself(systemd) {
		l.Expect()
	}
}

func (l *Launchers) keepLockFast() {
	defer l.expecting.Store(false) // an Expect that comes just now is not served; so be it
	var moved int                  // the launcher that was moved last
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

// idlePID returns the launcher that has been idle for the longest, 0 if there is none.
func (l *Launchers) idlePID() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle) == 0 || l.closed {
		return 0
	}
	return l.idle[0].pid
}
