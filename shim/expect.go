package shim

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"github.com/opencontainers/cgroups"
)

// Expect says that a launch will follow within some milliseconds. It returns at
// once, costs little, and is never needed: it makes the launch faster.
//
// Moving a process into a cgroup takes a lock that waits for an RCU grace period,
// 5 to 20 ms, unless it was taken a moment ago (cgroup_threadgroup_rwsem; the mount
// option favordynmods, Linux 6.0, avoids it for the whole machine). Expect takes it
// once beforehand, while there is other work to do, by moving an idle launcher to
// the cgroup that it is in.
func (l *Launchers) Expect() {
	if !l.expecting.CompareAndSwap(false, true) {
		return
	}
	pid := l.idlePID()
	if pid == 0 {
		l.expecting.Store(false)
		return
	}
	l.owned.Go(func() {
		defer l.expecting.Store(false)
		if err := moveToOwnCgroup(pid); err != nil {
			l.cfg.Log.Debug("prepare the kernel for a launch", "error", err)
		}
	})
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

// moveToOwnCgroup changes nothing: a launcher is moved by nobody else.
func moveToOwnCgroup(pid int) error {
	id := strconv.Itoa(pid)
	paths, err := cgroups.ParseCgroupFile("/proc/" + id + "/cgroup")
	if err != nil {
		return err
	}
	dir := filepath.Join("/sys/fs/cgroup", paths[""])
	if !cgroups.IsCgroup2UnifiedMode() {
		const any = "freezer" // the lock is one for all hierarchies
		path, ok := paths[any]
		if !ok {
			return errors.New("there is no freezer hierarchy")
		}
		dir = filepath.Join("/sys/fs/cgroup", any, path)
	}
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(id), 0)
}
