package shim

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/opencontainers/cgroups"
)

const (
	// expectTime is how long after an Expect a launch is still expected.
	expectTime = 100 * time.Millisecond
	// expectPace is shorter than a grace period.
	expectPace = 5 * time.Millisecond
)

// Expect says that a launch will follow within a tenth of a second. It returns at
// once and is never needed: it makes the launch faster, by 5 to 20 ms. A Launch says
// so for those that follow it.
//
// To move a process into a cgroup the kernel takes a lock that makes it wait for an
// RCU grace period, unless the lock was taken within the last one
// (cgroup_threadgroup_rwsem; the mount option favordynmods, Linux 6.0, changes that
// for the whole machine). While a launch is expected, the lock is taken again and
// again, for some microseconds each, by moving an idle launcher to the cgroup that it
// is in. So the wait is over when it matters.
func (l *Launchers) Expect() {
	until := time.Now().Add(expectTime) // with its monotonic reading: the clock may be set
	l.expectUntil.Store(&until)
	if l.expecting.CompareAndSwap(false, true) {
		l.owned.Go(l.keepLockFast)
	}
}

func (l *Launchers) keepLockFast() {
	defer l.expecting.Store(false) // an Expect that comes just now is not served; so be it
	var moved int                  // the launcher that was moved last,
	var procs string               // and where it was moved to
	for time.Now().Before(*l.expectUntil.Load()) {
		if pid := l.idlePID(); pid != 0 {
			var err error
			if pid != moved {
				procs, err = procsOf(pid)
				moved = pid
			}
			if err == nil {
				err = moveToOwnCgroup(pid, procs)
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

// idlePID returns the launcher that will be taken last, 0 if there is none.
func (l *Launchers) idlePID() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle) == 0 || l.closed {
		return 0
	}
	return l.idle[0].pid
}

// procsOf returns the file of processes of a launcher's cgroup.
func procsOf(pid int) (string, error) {
	paths, err := cgroups.ParseCgroupFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return "", err
	}
	dir := filepath.Join("/sys/fs/cgroup", paths[""])
	if !cgroups.IsCgroup2UnifiedMode() {
		const any = "freezer" // the lock is one for all hierarchies
		path, ok := paths[any]
		if !ok {
			return "", errors.New("there is no freezer hierarchy")
		}
		dir = filepath.Join("/sys/fs/cgroup", any, path)
	}
	return filepath.Join(dir, "cgroup.procs"), nil
}

// moveToOwnCgroup changes nothing: a launcher is moved by nobody else.
func moveToOwnCgroup(pid int, procs string) error {
	return os.WriteFile(procs, []byte(strconv.Itoa(pid)), 0)
}
