package launcher

import (
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/proto"
)

// prepareMonitor takes all steps for the monitor that can fail, so that only execve remains after
// the reply. It changes this goroutine's thread for good.
func (c *launch) prepareMonitor() error {
	if c.Pause != "" {
		return nil
	}
	if !c.Lasts {
		signal.Ignore(proto.IgnoredSignals...)
	}
	if err := c.l.enterHost(); err != nil {
		return err
	}
	if err := c.openLog(); err != nil {
		return err
	}
	c.monitor = proto.MonitorParams{
		ID:        c.ID,
		Dir:       c.Dir,
		MaxLine:   c.MaxLogLine,
		InitPID:   c.started.InitPID,
		StdinOnce: c.StdinOnce,
		Orphans:   c.inheritsOrphans(),
		Init:      fd(c.init),
		Listen:    fd(c.io.listener),
		Log:       fd(c.io.log),
		Stdin:     fd(c.io.stdin),
		Stdout:    fd(c.io.stdout),
		Stderr:    fd(c.io.stderr),
		Console:   fd(c.io.console),
		Verdict:   -1,
		Gate:      -1,
	}
	if c.LogPath != "" {
		c.monitor.LogDir, c.monitor.LogPath = cleanLogPath(c.LogDir, c.LogPath)
	}
	if c.Stdin && c.Terminal {
		c.monitor.Stdin = c.monitor.Console
	}
	paths := c.group.Paths()
	if !c.privatePIDs() || c.restoresInside() {
		c.monitor.KillDir = killDir(paths)
	}
	c.openOOM()
	return nil
}

// openOOM opens the monitor's files about OOM kills. A restored container has no cgroup until it
// runs.
func (c *launch) openOOM() {
	paths := c.group.Paths()
	c.io.oom, c.io.oomNotify = openOOM(paths)
	if dir := paths[""]; dir != "" && c.io.oom != nil && c.io.oomNotify == nil {
		c.io.oomParent, _ = os.Open(filepath.Join(filepath.Dir(dir), "memory.events")) // the root has none
	}
	c.monitor.OOM, c.monitor.OOMNotify, c.monitor.OOMParent = fd(c.io.oom), fd(c.io.oomNotify), fd(c.io.oomParent)
}

// privatePIDs returns whether the kernel kills the container's processes when its init ends.
func (c *launch) privatePIDs() bool {
	return slices.ContainsFunc(c.Spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool {
		return ns.Type == specs.PIDNamespace && ns.Path == ""
	})
}

// openLog opens the log in the host's mount namespace, where the monitor later opens it again. A
// file that is open in another namespace would keep its mount there busy.
func (c *launch) openLog() error {
	if c.LogPath == "" {
		return nil
	}
	failpoint.Reach("launcher.open-log")
	fd, err := openLogFile(c.LogDir, c.LogPath)
	if err != nil {
		return err
	}
	failpoint.Reach("launcher.log-opened")
	c.io.log = os.NewFile(uintptr(fd), c.LogPath)
	return nil
}

// openLogFile opens the log file at path for appending and creates it (0640) if needed. Its
// directory must exist. dir is a parent directory of path. Below dir, openLogFile accepts only
// regular files and no symbolic links, because a container that mounts the log directory can create
// any file there. An empty dir means the direct parent. The monitor opens it in the same way
// (shim/monitor/logfile.c).
func openLogFile(dir, path string) (int, error) {
	dir, path = cleanLogPath(dir, path)
	name, below := strings.CutPrefix(path, strings.TrimSuffix(dir, "/")+"/")
	if !below {
		return -1, &os.PathError{Op: "open log", Path: path, Err: errors.New("not below " + dir)}
	}
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open log", Path: path, Err: err}
	}
	defer unix.Close(root)
	fd, err := openBeneath(root, name)
	if err != nil {
		return -1, &os.PathError{Op: "open log", Path: path, Err: err}
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errors.New("not a regular file")
	}
	if err != nil {
		return -1, errors.Join(&os.PathError{Op: "open log", Path: path, Err: err}, unix.Close(fd))
	}
	return fd, nil
}

// cleanLogPath returns the paths that openLogFile uses. The monitor compares them byte by byte.
func cleanLogPath(dir, path string) (cleanDir, cleanPath string) {
	if dir == "" {
		dir = filepath.Dir(path)
	}
	return filepath.Clean(dir), filepath.Clean(path)
}

func openBeneath(root int, path string) (int, error) {
	how := &unix.OpenHow{
		Flags:   unix.O_WRONLY | unix.O_CREAT | unix.O_APPEND | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Mode:    0o640,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	}
	// EAGAIN means that a rename raced with the path walk. The number of attempts is limited,
	// because a container could rename continuously.
	for attempt := 0; ; attempt++ {
		fd, err := unix.Openat2(root, path, how)
		if err != unix.EINTR && err != unix.EAGAIN || attempt == 100 {
			return fd, err
		}
	}
}

// fd returns a file's descriptor, or -1 for nil.
func fd(f *os.File) int {
	if f == nil {
		return -1
	}
	return int(f.Fd())
}

// killDir returns a cgroup directory with all of the container's processes.
func killDir(paths map[string]string) string {
	for _, hierarchy := range []string{"", "freezer", "pids", "memory", "devices"} {
		if dir := paths[hierarchy]; dir != "" {
			return dir
		}
	}
	return ""
}

// openOOM opens the file that counts OOM kills and, on cgroup v1, an eventfd for its changes. If
// that fails, the monitor reports no OOM kills, and the launch continues.
func openOOM(paths map[string]string) (file, notify *os.File) {
	if dir := paths[""]; dir != "" {
		if f, err := os.Open(filepath.Join(dir, "memory.events")); err == nil {
			return f, nil
		}
	}
	dir := paths["memory"]
	if dir == "" {
		return nil, nil
	}
	file, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err != nil {
		return nil, nil
	}
	efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return file, nil
	}
	notify = os.NewFile(uintptr(efd), "oom")
	registration := strconv.Itoa(efd) + " " + strconv.Itoa(int(file.Fd()))
	if err := os.WriteFile(filepath.Join(dir, "cgroup.event_control"), []byte(registration), 0); err != nil {
		_ = notify.Close()
		return file, nil
	}
	return file, notify
}

// enterHost locks the goroutine to its thread and moves the thread to the daemon's mount namespace.
// Other threads stay in the launcher's namespace, and execve ends them.
func (l *launcher) enterHost() error {
	runtime.LockOSThread()
	return enterMounts(l.hostMnt)
}

// enterMounts moves the thread, to which the goroutine is locked, to a mount namespace.
func enterMounts(ns *os.File) error {
	// The kernel refuses setns to a thread that shares root and working directory.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare(CLONE_FS)", err)
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns to a mount namespace", err)
	}
	return os.NewSyscallError("chdir", unix.Chdir("/"))
}

// becomeMonitor executes the monitor. It returns only on an error. The parameter keep keeps the
// launch's files reachable. Otherwise the garbage collector would close their descriptors.
func (l *launcher) becomeMonitor(path string, p *proto.MonitorParams, keep *launch) error {
	defer runtime.KeepAlive(keep)
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open /dev/null", err)
	}
	for _, std := range []int{0, 1, 2} { // the daemon's may be pipes whose reader waits for end of file
		if err := unix.Dup3(null, std, 0); err != nil {
			return os.NewSyscallError("dup3", err)
		}
	}
	inherited := p.FDs()
	for _, f := range keep.kept {
		inherited = append(inherited, int(f.Fd()))
	}
	for _, fd := range inherited {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return os.NewSyscallError("fcntl(F_SETFD)", err)
		}
	}
	failpoint.Reach("launcher.become-monitor")
	return syscall.Exec(path, append([]string{filepath.Base(path)}, p.Args()...), failpoint.Env())
}
