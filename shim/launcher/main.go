// Package launcher is the program berth-shim: a process that waits for a request from the daemon
// (package shim/proto).
//
// A launch creates a container with libcontainer, and starts the container's monitor. Then the
// launcher waits for the next request, as after an exec and the launch of a pause. Before Linux
// 6.15, and for some containers (proto.Launch.Lasts), it becomes the monitor instead (execve).
//
// The daemon starts a launcher in a mount namespace of its own, a peer of the host's. The launcher
// mounts the container's root filesystem only there, or in a namespace for this launch. The mount
// disappears with the container's last process. The monitor is in the host's namespace, so that it
// does not keep the other one.
package launcher

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"time"

	_ "github.com/opencontainers/cgroups/devices" // if it is not set, the cgroup managers refuse device rules
	"golang.org/x/sys/unix"

	"berth/shim/launcher/bpfcache"
	"berth/shim/proto"
)

// memoryLimit is the heap size, in bytes, that starts garbage collection. A launch allocates far
// less. A launcher that serves many execs would grow without a limit.
const memoryLimit = 24 << 20

// leastProcs is the least number of goroutines that can run at a time. While one waits in a system
// call, another one must not wait for Go's monitor thread, which is slow here (slack.go). A node
// with more processors has more anyway.
const leastProcs = 2

// Main serves requests until the daemon closes the connection, and returns the exit status. It does
// not return if it becomes a monitor.
func Main(settings proto.LauncherSettings) int {
	// If nohup or a script in the background has started the daemon, it ignores these signals, and
	// containers would inherit that. signal.Reset does not help. Unlike SIG_IGN, a handler does not
	// survive execve.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT)
	// libcontainer passes this on to the container's init, whose start it shortens. This process's
	// own runtime has already read it.
	_ = os.Setenv("GOMAXPROCS", "1")
	_ = os.Unsetenv(proto.SlackEnv) // hooks must not inherit it
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), leastProcs))
	nameProcess()
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(memoryLimit)
	l, err := start(settings)
	if err == nil {
		warm()
		err = l.serve()
	}
	if err != nil && !daemonIsGone(err) {
		logFailure(os.Stderr, settings.LogFormat, l, err)
		return 1
	}
	return 0
}

// daemonIsGone returns whether the connection is closed, because the daemon has cancelled the
// request or has ended. Then the launcher has undone its work and sends no reply.
func daemonIsGone(err error) bool {
	//nolint:errorlint // a wrapped EOF is a request that was cut off
	return err == io.EOF || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// logFailure logs to the daemon's standard error in its format. l is nil if the launcher failed to
// start.
func logFailure(w io.Writer, format string, l *launcher, err error) {
	var handler slog.Handler = slog.NewTextHandler(w, nil)
	if format == "json" {
		handler = slog.NewJSONHandler(w, nil)
	}
	log := slog.New(handler).With("pid", os.Getpid())
	if l != nil && l.container != "" {
		log = log.With("container", l.container)
	}
	log.Error("launcher failed", "error", err)
}

// launcher is the state of this process.
type launcher struct {
	settings proto.LauncherSettings
	conn     *proto.Conn
	hostMnt  *os.File // the daemon's mount namespace
	filters  *bpfcache.Table
	warnings *warningList
	children children // of earlier launches
	last     *loaded  // the container of the last exec; nil: none yet
	served   int      // requests since the last release of memory

	container string // ID of the container or pod of the last request; empty: none yet
}

// start takes over the inherited descriptors.
func start(settings proto.LauncherSettings) (*launcher, error) {
	for fd := proto.SocketFD; fd <= proto.FiltersFD; fd++ {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return nil, errors.New("berth starts berth-shim; it does not work by hand")
		}
	}
	if err := unix.Close(proto.ExeFD); err != nil { // the running program needs no descriptor
		return nil, os.NewSyscallError("close", err)
	}
	conn, err := proto.NewConn(os.NewFile(proto.SocketFD, "control"))
	if err != nil {
		return nil, err
	}
	return &launcher{
		settings: settings,
		conn:     conn,
		hostMnt:  os.NewFile(proto.MountNSFD, "host mount namespace"),
		filters:  bpfcache.NewTable(os.NewFile(proto.FiltersFD, "seccomp filters")),
		warnings: collectWarnings(),
	}, nil
}

// serve carries out requests until the daemon closes the connection.
func (l *launcher) serve() error {
	for {
		var r proto.Request
		files, err := l.await(&r)
		if err != nil {
			return err
		}
		if again, err := l.carryOut(&r, files); err != nil || !again {
			return err
		}
	}
}

// carryOut carries out a request and returns whether another one may follow. It stays on one thread
// with the daemon's timer slack, which the processes it starts inherit.
func (l *launcher) carryOut(r *proto.Request, files []*os.File) (again bool, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	l.served++
	if err := restoreSlack(); err != nil {
		return false, err
	}
	switch {
	case r.Launch != nil:
		l.served += launchWeight - 1
		l.container = r.Launch.ID
		return l.serveLaunch(r.Launch, files)
	case r.Exec != nil:
		l.container = r.Exec.ID
		return true, l.serveExec(r.Exec, files)
	case r.Dump != nil:
		l.container = r.Dump.ID
		return false, l.serveDump(r.Dump, files)
	case r.Kill != "": // its exec has ended
		return true, nil
	}
	return false, errors.New("unknown request; berth and berth-shim have different versions")
}

// restTime is the time without a request after which a launcher releases the memory of earlier
// ones.
const restTime = time.Second

// keptRequests is the number of requests after which a launcher releases memory when it rests. An
// exec leaves some 50 KB, and up to 1 MB if the launcher has to load the state of its container. A
// launch leaves 200 KB and a pidfd, and counts as launchWeight requests.
const (
	keptRequests = 16
	launchWeight = 4
	// After so many requests it releases memory without a rest. This also closes pidfds, before
	// their numbers reach proto.FirstKeptFD.
	mostRequests = 200
)

// await receives the next request.
func (l *launcher) await(r *proto.Request) ([]*os.File, error) {
	if l.served < keptRequests {
		return l.conn.Receive(r)
	}
	if l.served > mostRequests {
		l.release()
		return l.conn.Receive(r)
	}
	if err := l.conn.SetDeadline(time.Now().Add(restTime)); err != nil {
		return nil, err
	}
	files, err := l.conn.Receive(r)
	rests := errors.Is(err, os.ErrDeadlineExceeded)
	if err := l.conn.SetDeadline(time.Time{}); err != nil {
		return files, err
	}
	if !rests {
		return files, err
	}
	l.release()
	return l.conn.Receive(r)
}

// release frees the memory of earlier requests.
func (l *launcher) release() {
	debug.FreeOSMemory()
	l.served = 0
}

// reply sends a reply with the warnings since the last one.
func (l *launcher) reply(r proto.Reply, files ...*os.File) error {
	r.Warnings = l.warnings.take()
	return l.conn.Send(r, files...)
}

// nameProcess sets the name that ps shows. Otherwise the name would be the number of the descriptor
// through which the program was executed.
func nameProcess() {
	_ = os.WriteFile("/proc/self/comm", []byte("berth-shim"), 0) // only people read it
}
