package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/task"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// Processes finds, signals, watches and removes the processes of pauses and containers.
type Processes struct {
	Dirs          state.Dirs
	SystemdCgroup bool // cgroup paths name scopes of systemd's
	Tasks         *task.Runner
	Log           *slog.Logger
}

// KillWait bounds the wait for killed processes. A process that takes longer is stuck in the
// kernel; the rest of the pod is taken down without it.
const KillWait = 10 * time.Second

// ShimPatience bounds the time between a container's end and its shim's report. It is less than
// KillWait, so that a pod's stop does not fail because of it.
const ShimPatience = KillWait / 2

// stoppedPatience is the same for a shim that is stopped, and so does nothing.
const stoppedPatience = 2 * time.Second

// orphanPatience bounds the wait for a dead init's other processes before the exit is recorded in
// place of the shim.
const orphanPatience = 2 * time.Second

// Running are the processes of a container that has a shim.
type Running struct {
	Init, Shim *os.File // pidfds; nil for what had ended when an earlier daemon's container was found
	PID        int      // of Init
	StartedAt  time.Time
	Exited     chan struct{} // closed when the exit is published

	left    atomic.Pointer[time.Time] // when Init was first found to have ended, its shim not
	settled context.Context           // ends when the exit record is written and the shim does nothing any more, though it may not have ended
	settle  context.CancelFunc
}

// Launched returns the processes that a launch has made.
func Launched(s *proto.Started) *Running { return newRunning(s.Init, s.Shim, s.InitPID, s.StartedAt) }

func newRunning(init, shim *os.File, pid int, startedAt time.Time) *Running {
	r := &Running{Init: init, Shim: shim, PID: pid, StartedAt: startedAt, Exited: make(chan struct{})}
	r.settled, r.settle = context.WithCancel(context.Background())
	return r
}

// Close gives up the pidfds.
func (r *Running) Close() error {
	r.settle()
	var errs []error
	for _, f := range []*os.File{r.Shim, r.Init} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// EndShim kills a hanging shim and writes the exit record in its place. It reads the status of init
// first: init is the shim's child, and its status is lost with the shim. AwaitShim then returns. A
// frozen shim ends only when it is thawed, and does nothing then.
func (k Processes) EndShim(ctx context.Context, id, cgroupsPath string, r *ociruntime.Runtime, run *Running) error {
	noteErr := k.noteEnd(ctx, id, cgroupsPath, r, run)
	if noteErr != nil { // the exit code is unknown then
		k.Log.Error("find out how a container has ended whose shim hangs", "container", id, "error", noteErr)
	}
	if err := signal(run.Shim, unix.SIGKILL); err != nil {
		return err
	}
	if noteErr == nil {
		run.settle()
	}
	return nil
}

// noteEnd writes the exit record from init's status, unless the shim wrote one. Like the shim, it
// first kills all other processes of the cgroup. kubelet starts the next instance after the exit.
func (k Processes) noteEnd(ctx context.Context, id, cgroupsPath string, r *ociruntime.Runtime, run *Running) error {
	if _, err := shim.ReadExit(k.Dirs.Shim(id)); err == nil {
		return nil
	}
	if r != nil && r.Sandboxed {
		return errors.New("only its shim reads what the runtime tells of the end") // run.Init is "runsc wait", which exits with 0
	}
	if run.Init == nil {
		return errors.New("its init was gone before")
	}
	status, err := pidfd.ZombieStatus(run.Init)
	if err != nil {
		return err
	}
	exit := proto.Exit{Code: int32(status.ExitStatus()), At: *run.left.Load()}
	if status.Signaled() {
		exit.Signal = int(status.Signal())
		exit.Code = 128 + int32(exit.Signal)
	}
	group, err := cgroup.Open(cgroupsPath, k.SystemdCgroup)
	if err != nil {
		return err
	}
	kills, err := group.OOMKills()
	if err != nil {
		return err
	}
	exit.OOMKilled = kills > 0
	// The exit is recorded even if the caller has given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), orphanPatience)
	defer cancel()
	if err := group.Kill(ctx); err != nil {
		return err
	}
	return shim.WriteExit(k.Dirs.Shim(id), exit)
}

// Signal sends a signal to the init of a container. r is its runtime, nil for libcontainer; a
// sandboxing runtime sends the signal itself. An ended init is no error: its exit follows.
func (k Processes) Signal(ctx context.Context, id string, r *ociruntime.Runtime, run *Running, sig unix.Signal) error {
	if r == nil || !r.Sandboxed || run.HasEnded() {
		return run.signal(sig)
	}
	ctx, cancel := context.WithTimeout(ctx, KillWait)
	defer cancel()
	err := r.Kill(ctx, id, sig)
	if err != nil && run.HasEnded() {
		return nil
	}
	return err
}

// Kill sends SIGKILL to the container's init and to its cgroup. It does the second also if the
// first fails, because a runtime's program may hang.
func (k Processes) Kill(ctx context.Context, id, cgroupsPath string, r *ociruntime.Runtime, run *Running) error {
	failpoint.Reach("container.kill")
	err := k.Signal(ctx, id, r, run, unix.SIGKILL)
	if err != nil {
		err = fmt.Errorf("kill container %s: %w", id, err)
	}
	failpoint.Reach("container.killed")
	group, openErr := cgroup.Open(cgroupsPath, k.SystemdCgroup)
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	return errors.Join(err, group.Signal())
}

// signal sends a signal to the init. One that has ended is no error: its exit follows.
func (r *Running) signal(sig unix.Signal) error { return signal(r.Init, sig) }

func signal(process *os.File, sig unix.Signal) error {
	if process == nil {
		return nil
	}
	return ignoreDone(pidfd.Signal(process, sig))
}

// ignoreDone drops the errors of a process that has ended, and been forgotten.
func ignoreDone(err error) error {
	if errors.Is(err, os.ErrProcessDone) || errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// End kills a process and waits until it has ended. One that has ended is no error.
func (k Processes) End(ctx context.Context, process *os.File) error {
	failpoint.Reach("process.end")
	err := signal(process, unix.SIGKILL)
	failpoint.Reach("process.ending")
	if err != nil {
		return err
	}
	return ignoreDone(pidfd.Wait(ctx, process))
}

// ShimHangs reports whether the shim outlived its container for longer than ShimPatience: it is
// stopped, or blocked on a log. The time counts from the first call.
func (r *Running) ShimHangs() bool {
	if !r.HasEnded() && !r.isZombie() {
		return false
	}
	if r.left.Load() == nil {
		now := time.Now() // with its monotonic reading
		r.left.CompareAndSwap(nil, &now)
	}
	patience := ShimPatience
	if r.shimIsStopped() {
		patience = stoppedPatience
	}
	return time.Since(*r.left.Load()) > patience
}

// isZombie reports whether all threads of init have ended while its pidfd does not report it,
// because another process traces one of them.
func (r *Running) isZombie() bool {
	if r.Init == nil {
		return false
	}
	_, err := pidfd.ZombieStatus(r.Init)
	return err == nil
}

// shimIsStopped reports whether the shim is in a stopped state. A shim that cannot be inspected
// counts as working.
func (r *Running) shimIsStopped() bool {
	if r.Shim == nil {
		return false
	}
	stopped, err := pidfd.Stopped(r.Shim)
	return stopped && err == nil
}

// HasEnded reports whether init has ended. Its process ID is then meaningless.
func (r *Running) HasEnded() bool {
	if r.Init == nil {
		return true
	}
	ended, err := pidfd.Exited(r.Init)
	return ended || err != nil
}

// AwaitExit waits for the exit to be published, which closes run.Exited, for at most limit. The
// caller notes the wait.
func (k Processes) AwaitExit(ctx context.Context, run *Running, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-run.Exited:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// lookTime is how often a container that is to end is looked at.
const lookTime = 500 * time.Millisecond

// AwaitStop is AwaitExit, but returns early for a stopped shim, which cannot report the exit, and
// for an unreadable exit record. A working shim gets all the time, on a slow disk for example:
// killing it would lose the exit.
func (k Processes) AwaitStop(ctx context.Context, id string, run *Running, limit time.Duration) bool {
	for begin := time.Now(); ; {
		left := limit - time.Since(begin)
		if k.AwaitExit(ctx, run, min(left, lookTime)) {
			return true
		}
		if left <= lookTime || ctx.Err() != nil || run.ShimHangs() && run.shimIsStopped() ||
			k.UnreadableExit(id, run) != nil {
			return false
		}
	}
}

// AwaitEnd waits until a process has ended; false means that the daemon ends, and with it the
// lifetime Watchers. Trouble with the pidfd does not mean that the process has ended: it is waited
// for again.
func (k Processes) AwaitEnd(process *os.File, object string) bool {
	return k.awaitEnd(process, object, context.Background())
}

// AwaitShim is AwaitEnd of a container's shim, and returns, too, when that does nothing any more
// (EndShim).
func (k Processes) AwaitShim(run *Running, object string) bool {
	return k.awaitEnd(run.Shim, object, run.settled)
}

// awaitEnd waits until the process or enough has ended.
func (k Processes) awaitEnd(process *os.File, object string, enough context.Context) bool {
	ctx, cancel := context.WithCancel(k.Tasks.Watchers.Context())
	defer cancel()
	defer context.AfterFunc(enough, cancel)()
	for {
		err := pidfd.Wait(ctx, process)
		if k.Tasks.Watchers.Context().Err() != nil {
			return false
		}
		if err == nil || enough.Err() != nil {
			return true
		}
		k.Log.Error("watch a process", "object", object, "error", err)
		if !k.Tasks.Sleep(k.Tasks.Watchers.Context(), time.Second, "another try to watch", object) {
			return false
		}
	}
}
