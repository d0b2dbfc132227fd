package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/proto"
	"berth/shim/running"
)

// Config configures a pool of launchers.
type Config struct {
	ShimPath    string       // the berth-shim binary
	MonitorPath string       // the monitor, as payload.Install put it
	StateRoot   string       // libcontainer's state, one directory per container; below the private state mount
	Idle        int          // launchers kept ready
	Warm        bool         // use idle launchers; false: later mounts would not reach them, so one is started per launch
	Log         *slog.Logger // nil: slog.Default()
	LogFormat   string       // of the launchers' own log lines: "json", otherwise text

	SystemdCgroup bool // cgroup driver
}

// Launchers is a pool of launcher processes, which start containers and execs. One goroutine starts
// launchers ahead of need. They exit when this process ends. It is safe for concurrent use.
type Launchers struct {
	cfg       Config
	oom       oomScores
	spareTime time.Duration // the constant, except in tests
	filters   *os.File      // compiled seccomp filters that all launchers share
	exe       *os.File      // sealed copy of ShimPath, so containers cannot write to it (CVE-2019-5736), and launchers need not copy it

	keepsStatus bool // the kernel keeps the exit status of a reaped process (Linux 6.15)
	moves       bool // inits are moved into their cgroups, see Expect

	refill chan struct{} // wakes keepFilled; capacity 1
	ctx    context.Context
	stop   context.CancelFunc
	owned  sync.WaitGroup // all goroutines of the pool

	starts atomic.Uint64 // see Counts
	losses atomic.Uint64

	expecting   atomic.Bool // keepMovesFast runs
	expectUntil atomic.Pointer[time.Time]

	mu sync.Mutex
	// +checklocks:mu
	lent int // launchers that serve execs or launches and then return to the pool
	// +checklocks:mu
	idle []idleLauncher // idle longest first
	// +checklocks:mu
	closed bool
}

// The pool keeps more idle launchers than Config.Idle for a while. After several simultaneous pod
// starts or execs, more usually follow soon. Starting a launcher takes 10 ms of CPU time, more than
// an exec.
const (
	maxSpare  = 8               // some MB each
	spareTime = 5 * time.Second // of idleness
)

// idleLauncher is a launcher in the pool. A goroutine watches the process and reaps it when it
// dies.
type idleLauncher struct {
	*launcher
	unwatch context.CancelFunc
	since   time.Time
}

// New starts the pool. It reads ShimPath once.
func New(cfg Config) (*Launchers, error) {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	exe, err := sealedCopy(cfg.ShimPath)
	if err != nil {
		return nil, fmt.Errorf("launcher %s: %w", cfg.ShimPath, err)
	}
	scores, err := readOOMScores()
	if err != nil {
		return nil, errors.Join(err, exe.Close())
	}
	filters, err := sharedMemory("berth-seccomp")
	if err != nil {
		return nil, errors.Join(err, exe.Close())
	}
	l := &Launchers{
		cfg:       cfg,
		oom:       scores,
		spareTime: spareTime,
		exe:       exe,
		filters:   filters,
		refill:    make(chan struct{}, 1),

		keepsStatus: pidfd.KeepsStatus(),
		moves:       !cgroups.IsCgroup2UnifiedMode() || !cgroup.StartsInside(cfg.SystemdCgroup),
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.owned.Go(l.keepFilled)
	l.wantMore()
	return l, nil
}

// Close ends the idle launchers and waits for them. Launches and execs must have returned.
// Containers and their monitors continue.
func (l *Launchers) Close() error {
	l.mu.Lock()
	l.closed = true
	idle := l.idle
	l.idle = nil
	l.mu.Unlock()
	l.stop()
	for _, p := range idle {
		p.unwatch()
		l.retire(p.launcher)
	}
	l.owned.Wait()
	return errors.Join(l.exe.Close(), l.filters.Close())
}

// Counts are numbers of launchers.
type Counts struct {
	Idle    int    // ready for a launch or an exec
	Serving int    // in an exec or a launch, and used again afterwards
	Started uint64 // since New
	Lost    uint64 // exited while idle or during a launch, since New
}

// Counts returns the numbers of launchers.
func (l *Launchers) Counts() Counts {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Counts{Idle: len(l.idle), Serving: l.lent, Started: l.starts.Load(), Lost: l.losses.Load()}
}

// launcher is the daemon's end of one launcher process.
type launcher struct {
	conn *proto.Conn
	pid  int
	proc *os.File // pidfd

	parent bool   // of containers that it has launched
	loaded string // ID of the container whose state it has cached since its last exec; empty: none
}

// startRetry is the pause after a failed start ahead of need, and after an idle launcher's death.
const startRetry = 2 * time.Second

// keepFilled starts launchers ahead of need and retires spare ones.
func (l *Launchers) keepFilled() {
	var again, calm <-chan time.Time
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.refill:
		case <-again:
		case <-calm:
		}
		again, calm = nil, nil
		if rest := l.retireSpare(); rest > 0 {
			calm = time.After(rest)
		}
		for l.missing() > 0 && l.ctx.Err() == nil {
			p, err := l.start()
			if err != nil {
				// The next launch tries again and returns the error.
				l.cfg.Log.Error("start launcher ahead of need", "error", err)
				again = time.After(startRetry)
				break
			}
			l.put(p)
		}
	}
}

// wantMore wakes keepFilled.
func (l *Launchers) wantMore() {
	select {
	case l.refill <- struct{}{}:
	default: // a wake-up is pending
	}
}

func (l *Launchers) missing() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || !l.cfg.Warm {
		return 0
	}
	// Launchers that serve a request return later, but the next launch needs one at once.
	return max(l.cfg.Idle-len(l.idle)-l.lent, min(l.cfg.Idle, 1)-len(l.idle))
}

// lend counts the launchers that serve a request and then return.
func (l *Launchers) lend(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lent += n
}

// giveBack returns a launcher to the pool after its exec has ended.
func (l *Launchers) giveBack(p *launcher) {
	err := l.oom.giveBack(p.pid)
	if err == nil {
		l.offer(p, 1)
		return
	}
	l.lend(-1)
	l.cfg.Log.Warn("retire launcher: its oom_score_adj cannot be restored", "pid", p.pid, "error", err)
	l.retire(p)
	l.wantMore()
}

// giveUp retires a launcher that was lost, or whose exec has not ended. After the launcher has
// exited, giveUp removes the remains of the exec.
func (l *Launchers) giveUp(p *launcher, req *proto.Exec) {
	l.lend(-1)
	l.retire(p, func() { l.removeExecRemains(req) })
	l.wantMore()
}

// giveUpUnresponsive is giveUp for a launcher that does not read its request. It returns after the
// removal of the remains, because the next launcher that gets the request uses the same names.
func (l *Launchers) giveUpUnresponsive(p *launcher, req *proto.Exec) {
	l.lend(-1)
	if err := p.killUnresponsive(); err != nil {
		l.cfg.Log.Error("kill launcher", "pid", p.pid, "error", err)
	}
	l.tryRemoveExec(req)
	l.retire(p)
	l.retireStopped()
}

// forget closes the daemon's end of a launcher that another process owns. The launcher stays a
// child of this process, which reaps it.
func (l *Launchers) forget(p *launcher) {
	l.lend(-1)
	if err := p.conn.Close(); err != nil {
		l.cfg.Log.Warn("close connection to launcher", "pid", p.pid, "error", err)
	}
	l.owned.Go(func() {
		defer p.proc.Close()
		_ = pidfd.Wait(l.ctx, p.proc) // after the daemon's end, init reaps it
	})
	l.wantMore()
}

// removeExecRemains removes the processes and files that a launcher has left of an exec. On an
// error it retries until it succeeds or the daemon stops.
func (l *Launchers) removeExecRemains(req *proto.Exec) {
	running.RecordOf(req).RemoveUntil(l.ctx, l.cfg.Log)
}

func (l *Launchers) tryRemoveExec(req *proto.Exec) {
	if err := running.RecordOf(req).Remove(); err != nil {
		l.cfg.Log.Error("remove an exec of a lost launcher", "container", req.ID, "exec", req.ExecID, "error", err)
	}
}

// put adds p to the pool, or retires it if the pool is full.
func (l *Launchers) put(p *launcher) { l.offer(p, 0) }

// offer is put for a launcher that counts as lent (1) or not (0).
func (l *Launchers) offer(p *launcher, lent int) {
	kept, spare := l.keep(p, lent)
	if !kept {
		l.retire(p)
	}
	if spare {
		l.wantMore() // keepFilled retires spare ones after a while
	}
}

func (l *Launchers) keep(p *launcher, lent int) (kept, spare bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lent -= lent // under the same lock, or keepFilled would start another launcher in between
	if l.closed || len(l.idle) >= l.enough()+l.spare() {
		return false, false
	}
	ctx, unwatch := context.WithCancel(l.ctx)
	l.idle = append(l.idle, idleLauncher{p, unwatch, time.Now()})
	l.owned.Go(func() { l.watch(ctx, p) })
	return true, len(l.idle) > l.enough()
}

// enough returns the number of idle launchers that stay in the pool.
func (l *Launchers) enough() int { return max(l.cfg.Idle, 1) }

// spare returns the number of additional launchers that stay for spareTime.
func (l *Launchers) spare() int {
	if l.cfg.Idle == 0 {
		return 0 // the pool is off
	}
	return maxSpare
}

// retireSpare ends spare launchers that were idle for spareTime. It returns the time until the next
// launcher is due, or 0 if there is no spare launcher.
func (l *Launchers) retireSpare() (rest time.Duration) {
	spare, rest := l.takeSpare()
	for _, p := range spare {
		l.retire(p)
	}
	return rest
}

// takeSpare removes the launchers that retireSpare ends from the pool. Probes that take and return
// launchers meanwhile do not delay it.
func (l *Launchers) takeSpare() (spare []*launcher, rest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.idle) > l.enough() {
		if rest := l.spareTime - time.Since(l.idle[0].since); rest > 0 {
			return spare, rest
		}
		spare = append(spare, l.takeAt(0))
	}
	return spare, 0
}

// watch waits until p dies or is taken. After a death it delays the next launcher. The cause, such
// as a lack of threads on the node, would also kill the next launcher.
func (l *Launchers) watch(ctx context.Context, p *launcher) {
	err := pidfd.Wait(ctx, p.proc)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil: // take will check it
		l.cfg.Log.Warn("watch idle launcher", "pid", p.pid, "error", err)
		return
	case !l.drop(p):
		return // it was just taken, and the caller will notice its death
	}
	l.losses.Add(1)
	l.cfg.Log.Warn("idle launcher died", "pid", p.pid)
	l.retire(p)
	select {
	case <-l.ctx.Done():
	case <-time.After(startRetry):
		l.wantMore()
	}
}

// drop removes p from the pool and returns whether the pool contained it.
func (l *Launchers) drop(p *launcher) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.idle, func(i idleLauncher) bool { return i.launcher == p })
	if i < 0 {
		return false
	}
	l.idle[i].unwatch()
	l.idle = slices.Delete(l.idle, i, i+1)
	return true
}

// retireTimeout bounds the exit of a launcher whose connection was closed.
const retireTimeout = 10 * time.Second

// retire ends a launcher. A goroutine waits for its exit and then calls after.
func (l *Launchers) retire(p *launcher, after ...func()) {
	if err := p.conn.Close(); err != nil {
		l.cfg.Log.Warn("close connection to launcher", "pid", p.pid, "error", err)
	}
	l.owned.Go(func() {
		defer p.proc.Close()
		l.awaitEnd(p)
		for _, do := range after {
			do()
		}
	})
}

// awaitEnd waits for the end of a retired launcher and kills it after retireTimeout.
func (l *Launchers) awaitEnd(p *launcher) {
	ctx, cancel := context.WithTimeout(context.Background(), retireTimeout)
	defer cancel()
	if err := pidfd.Wait(ctx, p.proc); err == nil {
		return
	}
	l.cfg.Log.Warn("launcher does not exit, killing it", "pid", p.pid)
	err := kill(p.proc)
	if err == nil {
		return
	}
	l.cfg.Log.Error("kill launcher", "pid", p.pid, "error", err)
	_ = pidfd.Wait(l.ctx, p.proc) // a frozen launcher exits when it is thawed, and is reaped then
}

// kill kills a process and reaps it.
func kill(proc *os.File) error { return killUpTo(proc, retireTimeout) }

// killUpTo kills a process and waits for its end, at most for timeout.
func killUpTo(proc *os.File, timeout time.Duration) error {
	if err := pidfd.Signal(proc, unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return pidfd.Wait(ctx, proc)
}

// start starts a launcher in a mount namespace that is a peer of this process's.
func (l *Launchers) start() (*launcher, error) {
	conn, theirs, err := proto.ConnPair()
	if err != nil {
		return nil, err
	}
	p, err := l.startWith(theirs)
	if closeErr := theirs.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, errors.Join(errdefs.Internal("start launcher: %w", err), conn.Close())
	}
	p.conn = conn
	return p, nil
}

func (l *Launchers) startWith(socket *os.File) (*launcher, error) {
	mnt, err := os.Open("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	defer mnt.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	fd := -1
	// With Unshareflags instead, package os would make all mounts private.
	attr := &os.ProcAttr{
		Files: []*os.File{
			null, null, os.Stderr,
			proto.SocketFD:  socket,
			proto.MountNSFD: mnt,
			proto.ExeFD:     l.exe,
			proto.FiltersFD: l.filters,
		},
		Env: append([]string{"PATH=" + os.Getenv("PATH"), proto.SlackEnv + "=1"}, failpoint.Env()...),
		Sys: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Setsid: true, PidFD: &fd},
		Dir: "/",
	}
	settings := proto.LauncherSettings{
		StateRoot:   l.cfg.StateRoot,
		MonitorPath: l.cfg.MonitorPath,
		LogFormat:   l.cfg.LogFormat,
	}
	exe := "/proc/self/fd/" + strconv.Itoa(proto.ExeFD)
	failpoint.Reach("launchers.start")
	proc, err := os.StartProcess(exe, append([]string{"berth-shim"}, settings.Args()...), attr)
	if err != nil {
		return nil, err
	}
	failpoint.Reach("launchers.started")
	l.starts.Add(1)
	pid := proc.Pid
	if err := proc.Release(); err != nil {
		return nil, err
	}
	if fd < 0 {
		return nil, errors.New("the kernel gives no pidfd; Linux 5.4 is needed")
	}
	f, err := pidfd.FromFD(fd)
	if err != nil {
		return nil, err
	}
	return &launcher{pid: pid, proc: f}, nil
}

// sharedMemory creates a file in memory for processes that inherit it.
func sharedMemory(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // MFD_NOEXEC_SEAL is Linux 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("memory for %s: %w", name, os.NewSyscallError("memfd_create", err))
	}
	return os.NewFile(uintptr(fd), name), nil
}

// sealedCopy copies a program into sealed memory, which no process can change.
func sealedCopy(path string) (_ *os.File, err error) {
	src, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("berth-shim", flags|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // MFD_EXEC exists since Linux 6.3; on older kernels it is the default
		fd, err = unix.MemfdCreate("berth-shim", flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "berth-shim")
	if _, err := io.Copy(f, src); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	// libcontainer does not copy a program with these seals again.
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	// A container with CAP_SYS_PTRACE can open the file while an exec enters the container. Its
	// root owns the file and could remove the execute permission. F_SEAL_EXEC (Linux 6.3) prevents
	// that.
	err = addSeals(f, seals|unix.F_SEAL_EXEC)
	if errors.Is(err, unix.EINVAL) {
		err = addSeals(f, seals)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// addSeals retries for a while after EBUSY: page migration, for example, holds a reference to one
// of the pages (memfd_wait_for_pins).
func addSeals(f *os.File, seals int) error {
	for try := 1; ; try++ {
		_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
		if !errors.Is(err, unix.EBUSY) || try == sealTries {
			return os.NewSyscallError("seal", err)
		}
		time.Sleep(sealRetry)
	}
}

// Pages are held for milliseconds. Each attempt includes 150 ms of waiting in the kernel.
const (
	sealTries = 20
	sealRetry = 50 * time.Millisecond
)
