package launcher

import (
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/proto"
)

// prepareMonitor does everything for the monitor that can fail, so that only execve remains after
// the reply. It changes this goroutine's thread for good.
func (c *launch) prepareMonitor() error {
	if c.Pause != "" {
		return nil
	}
	signal.Ignore(proto.IgnoredSignals...)
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
	}
	if c.LogPath != "" {
		c.monitor.LogDir, c.monitor.LogPath = cleanLogPath(c.LogDir, c.LogPath)
	}
	if c.Stdin && c.Terminal {
		c.monitor.Stdin = c.monitor.Console
	}
	paths := c.group.Paths()
	if !c.privatePIDs() {
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

// openLog opens the log in the host's mount namespace, where the monitor later opens it again. An
// open file keeps its mount busy.
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
// that fails the monitor reports no OOM kills; the launch continues.
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
// Other threads stay in the launcher's; execve ends them.
func (l *launcher) enterHost() error {
	runtime.LockOSThread()
	// The kernel refuses setns to a thread that shares root and working directory.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare(CLONE_FS)", err)
	}
	if err := unix.Setns(int(l.hostMnt.Fd()), unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns to the host's mount namespace", err)
	}
	return os.NewSyscallError("chdir", unix.Chdir("/"))
}

// becomeMonitor executes the monitor. It returns only on an error. The parameter keep keeps the
// launch's files reachable; the garbage collector would close their descriptors.
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
	// Huge pages would round up the monitor's buffers. execve keeps this setting.
	_ = unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0)
	failpoint.Reach("launcher.become-monitor")
	return syscall.Exec(path, append([]string{filepath.Base(path)}, p.Args()...), failpoint.Env())
}

// clampOOMScore raises the spec's oom_score_adj to the lowest value that this process may set. A
// lower one needs CAP_SYS_RESOURCE, and init would fail. The daemon does the same before and logs
// it.
func clampOOMScore(p *specs.Process) {
	if p.OOMScoreAdj == nil {
		return
	}
	const file = "/proc/self/oom_score_adj"
	own, err := os.ReadFile(file)
	if err != nil {
		return
	}
	now, err := strconv.Atoi(string(own[:max(len(own)-1, 0)]))
	if err != nil || *p.OOMScoreAdj >= now {
		return
	}
	if os.WriteFile(file, []byte(strconv.Itoa(*p.OOMScoreAdj)), 0) != nil {
		*p.OOMScoreAdj = now
		return
	}
	// That succeeded, so init may set it. Raising it again always succeeds.
	_ = os.WriteFile(file, own, 0)
}
