package ownership

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/checkpoint/record"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/sandbox/state"
	"berth/shim"
)

// Launch is a pod or container whose process runs. The process is a pause, or the init of a
// container.
type Launch struct {
	ID    string
	Init  int       // its process
	Start uint64    // of the process, in clock ticks since boot
	At    time.Time // of the launch; zero: root knows it, or it is unknown

	damaged bool // the record in the state directory is damaged
}

// Kill kills the process. The kernel and the monitor end the rest of a container.
func (l Launch) Kill() error {
	process, err := pidfd.OpenVerified(l.Init, l.Start)
	if err == nil {
		failpoint.Reach("unknown.kill")
		err = errors.Join(pidfd.Signal(process, unix.SIGKILL), process.Close())
		failpoint.Reach("unknown.killed")
	}
	if err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill process %d of %s: %w", l.Init, l.ID, err)
	}
	return nil
}

// launched returns the IDs of all launches below a state directory, which may have ended since.
func launched(dirs state.Dirs) (ids []string, err error) {
	entries, err := os.ReadDir(dirs.Shim(""))
	// ENOTDIR: a file has taken the place of the directory, or of one of its parents.
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("find running pods and containers: %w", err)
	}
	for _, e := range entries {
		if state.IsID(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// addLiving appends a launch if its process runs.
func addLiving(to []Launch, dirs state.Dirs, id string) ([]Launch, error) {
	l, err := readLaunch(dirs, id)
	if err != nil {
		return nil, err
	}
	return addRunning(to, l)
}

// readLaunch returns a launch of the state directory. The process is 0 if there is none. A launcher
// that has not made the process yet undoes the launch when its daemon is gone.
func readLaunch(dirs state.Dirs, id string) (Launch, error) {
	ids, err := shim.ReadShim(dirs.Shim(id))
	if errors.Is(err, fs.ErrNotExist) {
		return Launch{}, nil
	}
	if unread := (*fs.PathError)(nil); errors.As(err, &unread) {
		return Launch{}, err
	}
	l := Launch{ID: id, Init: ids.InitPID, Start: ids.InitStartTime, damaged: err != nil}
	if l.damaged {
		l.Init, l.Start, err = processOf(id)
	}
	return l, err
}

// processOf returns a process in the cgroup of a pod or container, whose name contains the ID. It
// returns 0 if there is none.
func processOf(id string) (pid int, start uint64, err error) {
	err = eachProcess(func(p int) {
		if pid != 0 {
			return
		}
		groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p))
		if err != nil || !strings.Contains(string(groups), id) { // gone, or another process
			return
		}
		if start, err = pidfd.StartTime(p); err == nil {
			pid = p
		}
	})
	return pid, start, err
}

// eachProcess calls use with the ID of each process of the node.
func eachProcess(use func(pid int)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			use(pid)
		}
	}
	return nil
}

// addRunning appends a launch if its process runs.
func addRunning(to []Launch, l Launch) ([]Launch, error) {
	if l.Init == 0 {
		return to, nil
	}
	alive, err := runs(l.Init, l.Start)
	if err != nil || !alive {
		return to, err
	}
	return append(to, l), nil
}

// pauseOf returns the pause that a pod's record of this boot names. The process is 0 if the record
// is missing, damaged or another object's.
func pauseOf(dirs state.Dirs, id, bootID string) (Launch, error) {
	found, err := state.InspectOne(dirs.Root, dirs.State, id)
	if err != nil {
		return Launch{}, err
	}
	p := found.Pods[id]
	if p == nil || p.BootID != bootID {
		return Launch{}, nil
	}
	return Launch{ID: id, Init: p.PausePID, Start: p.PauseStart}, nil
}

// isReadable reports whether a daemon can load the record of an object, or a newer one can.
func isReadable(dirs state.Dirs, id string) (bool, error) {
	found, err := state.InspectOne(dirs.Root, dirs.State, id)
	if err != nil {
		return false, err
	}
	newer := slices.ContainsFunc(found.Surveys, func(s record.Survey) bool { return len(s.Newer) > 0 })
	return newer || len(found.Pods)+len(found.Containers) > 0, nil
}

// runs reports whether the process with that ID and start time has not ended.
func runs(pid int, start uint64) (bool, error) {
	process, err := pidfd.OpenVerified(pid, start)
	if errors.Is(err, os.ErrProcessDone) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	ended, err := pidfd.Ended(process)
	return !ended, errors.Join(err, process.Close())
}

// monitorsOf returns the containers of all monitors that were installed below root.
func monitorsOf(root string) (found []Launch, err error) {
	if real, err := filepath.EvalSymlinks(root); err == nil {
		root = real
	}
	err = eachProcess(func(pid int) {
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil || !isMonitor(exe, root) { // a kernel thread, or gone
			return
		}
		args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil { // gone
			return
		}
		l, fd := watched(string(args))
		if l.Start, err = pidfd.StartTime(l.Init); err != nil || l.ID == "" {
			return
		}
		if pidfd.IsChild(l.Init, pid) || pidfd.Names(pid, fd, l.Init) {
			found = append(found, l)
		}
	})
	return found, err
}

// isMonitor reports whether a program is a monitor in the folder of programs below root.
func isMonitor(exe, root string) bool {
	exe = strings.TrimSuffix(exe, " (deleted)")
	return filepath.Base(exe) == "berth-monitor" && strings.HasPrefix(exe, filepath.Join(root, "bin")+"/")
}

// watched returns the container in a monitor's command line, and the descriptor of init's pidfd
// there, 0 if it has none.
func watched(cmdline string) (l Launch, fd int) {
	for arg := range strings.SplitSeq(cmdline, "\x00") {
		name, value, _ := strings.Cut(arg, "=")
		switch name {
		case "id":
			if state.IsID(value) {
				l.ID = value
			}
		case "init":
			l.Init, _ = strconv.Atoi(value) // the launcher writes numbers
		case "init-fd":
			fd, _ = strconv.Atoi(value)
		}
	}
	return l, fd
}
