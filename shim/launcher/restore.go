package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/shim/launcher/criu"
	"berth/shim/proto"
)

// restoreBackend makes a container from a checkpoint, with CRIU. libcontainer starts CRIU as a
// child of this process. CRIU makes the container's init a child of this process, too.
//
// libcontainer puts CRIU into the container's cgroup. A kill of that cgroup, by this process or by
// the daemon, ends an unfinished restore.
type restoreBackend struct {
	libcontainerBackend
	gate    resumeGate
	ns      *restoreNamespace
	lost    chan struct{}  // closed when CRIU has ended before the processes could run
	fault   error          // why the processes may not run
	waiting sync.WaitGroup // for CRIU's end
}

func (b *restoreBackend) prepare() error {
	if err := b.libcontainerBackend.prepare(); err != nil {
		return err
	}
	if err := b.checkStructure(); err != nil {
		return err
	}
	options := filepath.Join(b.Dir, criuOptions)
	b.undo.Add("remove "+options, func() error { return ignore(unix.Unlink(options), unix.ENOENT) })
	failpoint.Reach("launcher.write-criu-options")
	if err := os.WriteFile(options, []byte(restoreOptions), 0o600); err != nil {
		return fmt.Errorf("write CRIU's options: %w", err)
	}
	failpoint.Reach("launcher.criu-options-written")
	b.config.Labels = slices.DeleteFunc(b.config.Labels, func(l string) bool { return strings.HasPrefix(l, criuLabel) })
	b.config.Labels = append(b.config.Labels, criuLabel+options)
	return nil
}

// checkStructure refuses saved processes of an unusual form (criu.Check).
func (b *restoreBackend) checkStructure() error {
	vdso, err := criu.VDSO()
	if err != nil {
		return err
	}
	images, err := os.Open(b.Restore.Images)
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer images.Close() // it was only read
	return refusal(criu.Check(images, vdso, os.Getpagesize()))
}

// refusal adds the gRPC code to an error of package criu.
func refusal(err error) error {
	if refused := (*criu.Refused)(nil); errors.As(err, &refused) {
		return proto.Errorf(proto.FailedPrecondition, "restore from the checkpoint: %v", refused)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return proto.Errorf(proto.FailedPrecondition, "the checkpoint is not complete: %v", err)
	}
	return err
}

// criuOptions is a file in the shim directory with CRIU's options for a restore. CRIU reads it as
// its configuration file.
const criuOptions = "criu.conf"

// restoreOptions are the options that libcontainer cannot set. TCP connections are closed, because
// their peers were not frozen with them. The yard is a directory below workDir.
const restoreOptions = "tcp-close\ncgroup-yard " + restoreYard + "\n"

// criuLabel starts the label with the name of CRIU's configuration file. libcontainer reads it. If
// there is no label, CRIU would read /etc/criu/runc.conf.
const criuLabel = "org.criu.config="

// create makes no process. The restore in execute makes init.
func (b *restoreBackend) create() (pid int, err error) { return 0, b.makeContainer() }

// execute restores the processes and lets them run. It works on another thread, because this one
// has returned to the host's mount namespace. That thread is CRIU's parent. The thread ends
// afterwards, with its mount namespace.
func (b *restoreBackend) execute() error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- b.isolated(func() error { return adopting(b.inheritsOrphans(), b.restore) })
	}()
	err := <-done
	b.endStep("CRIU restore")
	return err
}

// isolated calls restore in a mount namespace whose mounts do not reach the host. CRIU mounts the
// container's filesystems in a new directory of /tmp and leaves them there when it is killed.
func (b *restoreBackend) isolated(restore func() error) error {
	failpoint.Reach("launcher.isolate")
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts slaves: %w", err)
	}
	failpoint.Reach("launcher.isolated")
	var err error
	if b.ns, err = b.enterNamespace(); err != nil {
		return err
	}
	defer b.ns.outside.Close() // Close of a namespace cannot fail
	return restore()
}

func (b *restoreBackend) restore() error {
	useCRIU, err := b.useCRIU()
	if err != nil {
		return err
	}
	defer useCRIU()
	// CRIU ends its helpers with SIGTERM. Unlike SIG_IGN, a handler does not survive execve.
	signal.Notify(make(chan os.Signal, 1), proto.IgnoredSignals...)
	defer signal.Ignore(proto.IgnoredSignals...)
	if err := b.reservePIDs(); err != nil {
		return err
	}
	if err := b.limitCRIU(); err != nil {
		return err
	}
	b.gate.open(b.resuming)
	b.ns.open(b.watchCRIU, b.refuse)
	b.lost = make(chan struct{})
	stop := b.watch()
	failpoint.Reach("launcher.restore")
	err = b.container.Restore(b.process, &libcontainer.CriuOpts{
		ImagesDirectory: b.Restore.Images,
		WorkDirectory:   b.workDir(),
		FileLocks:       true,
		LsmProfile:      b.profile(),
	})
	b.waiting.Wait()
	if err := b.verdict(stop(), err, func() string { return criuCause(b.workDir()) }); err != nil {
		return err
	}
	failpoint.Reach("launcher.restored")
	// They are in memory (/run) and of no use now. If that fails, they end with the container.
	_ = errors.Join(os.RemoveAll(b.workDir()), os.RemoveAll(b.binDir()))
	failpoint.Reach("launcher.criu-files-removed")
	return nil
}

// verdict returns why the processes are not restored, or nil. late means that CRIU had no time
// left. err is CRIU's failure, and cause returns the reason in its log.
func (b *restoreBackend) verdict(late bool, err error, cause func() string) error {
	switch {
	case b.fault != nil:
		return b.fault
	case late:
		return proto.Errorf(proto.FailedPrecondition, "CRIU has not restored the processes within %v", b.Restore.Timeout)
	case b.ctx.Err() != nil && !b.gate.passed():
		return errCancelled
	case err != nil:
		return proto.Errorf(proto.FailedPrecondition, "restore from the checkpoint: %v%s", err, cause())
	case !b.gate.passed():
		return errors.New("CRIU resumed the processes before they were recorded")
	}
	return nil
}

// binDir is the directory with the name of CRIU.
func (b *restoreBackend) binDir() string { return filepath.Join(b.l.settings.StateRoot, b.ID, "bin") }

// profile returns the AppArmor profile in CRIU's form. It comes from the spec. Otherwise CRIU would
// use that of the checkpoint. The daemon permits no restores on nodes with SELinux.
func (b *restoreBackend) profile() string {
	if p := b.Spec.Process; p.ApparmorProfile != "" {
		return "apparmor:" + p.ApparmorProfile
	}
	return ""
}

// workDir is the directory of CRIU's log.
func (b *restoreBackend) workDir() string { return filepath.Join(b.l.settings.StateRoot, b.ID, "criu") }

// maxCRIULog bounds the part of CRIU's log that is read for an error, in bytes.
const maxCRIULog = 1 << 20

// criuCause returns the first error in CRIU's log as a suffix of an error, or "".
func criuCause(dir string) string {
	f, err := os.Open(filepath.Join(dir, criuLog))
	if err != nil {
		return ""
	}
	defer f.Close()
	return firstError(f)
}

// criuLog is the name of CRIU's log of a restore.
const criuLog = "restore.log"

// maxCause limits the part of CRIU's log that goes into an error, in bytes.
const maxCause = 1 << 10

// firstError returns the first error in a log of CRIU as a suffix of an error, or "". The log has
// texts of the container, and a CRIU that was taken over may write anything.
func firstError(log io.Reader) string {
	text, err := io.ReadAll(io.LimitReader(log, maxCRIULog))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		_, cause, found := strings.Cut(line, "Error (")
		if found && !strings.Contains(cause, "RLIMIT_NOFILE") { // CRIU continues after that
			return ": (" + printable(cause, maxCause)
		}
	}
	return ""
}

// printable returns the printable characters of a text, at most limit bytes of them.
func printable(text string, limit int) string {
	text = strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, strings.ToValidUTF8(text, "?")))
	if len(text) > limit {
		return strings.ToValidUTF8(text[:limit], "") + "…"
	}
	return text
}

// useCRIU makes libcontainer find the configured CRIU, which it looks up by name. undo reverts the
// change.
func (b *restoreBackend) useCRIU() (undo func(), err error) {
	dir := b.binDir()
	before := os.Getenv("PATH")
	failpoint.Reach("launcher.link-criu")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Symlink(b.Restore.CRIU, filepath.Join(dir, "criu"))); err != nil {
		return nil, fmt.Errorf("name CRIU: %w", err)
	}
	failpoint.Reach("launcher.criu-linked")
	if err := os.Setenv("PATH", dir+":"+before); err != nil {
		return nil, err
	}
	return func() { _ = os.Setenv("PATH", before) }, nil
}

// Until stop is called, watch kills the restore when its time is over, when the daemon cancels the
// launch, or when CRIU is lost. stop returns whether the time was over.
func (b *restoreBackend) watch() (stop func() bool) {
	ctx, cancel := context.WithCancel(context.Background())
	timeout, release := context.WithTimeout(b.ctx, b.Restore.Timeout)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-ctx.Done():
			return
		case <-timeout.Done():
		case <-b.lost:
		}
		for ctx.Err() == nil {
			b.killAll(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(killInterval):
			}
		}
	}()
	return func() bool {
		late := errors.Is(timeout.Err(), context.DeadlineExceeded)
		cancel()
		<-ended
		release()
		return late
	}
}

// watchCRIU makes watch kill the restore if CRIU ends before the gate is passed. The unfinished
// processes hold CRIU's socket open, so libcontainer would wait for its answer until the limit.
func (b *restoreBackend) watchCRIU(pid int) error {
	criu, err := pidfd.Open(pid)
	if err != nil {
		return fmt.Errorf("find CRIU: %w", err)
	}
	b.waiting.Go(func() {
		defer criu.Close() // Close of a pidfd loses nothing
		if waitExit(int(criu.Fd())) == nil && !b.gate.passed() {
			close(b.lost)
		}
	})
	return nil
}

// findCRIU returns the PID of CRIU, when it is this process's only child.
func findCRIU() (int, error) {
	below, err := pidfd.Below(os.Getpid())
	if err != nil {
		return 0, fmt.Errorf("find CRIU: %w", err)
	}
	if len(below) != 1 {
		return 0, fmt.Errorf("find CRIU: the launcher has %d descendants", len(below))
	}
	return below[0], nil
}

// waitExit waits until the process of a pidfd has exited. It does not reap CRIU, because
// libcontainer does.
func waitExit(fd int) error {
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// killAll kills the container's processes and CRIU, which libcontainer starts outside the cgroup.
// The caller repeats it.
func (b *restoreBackend) killAll(ctx context.Context) {
	_ = b.group.Kill(ctx)
	below, err := pidfd.Below(os.Getpid())
	if err != nil {
		return
	}
	failpoint.Reach("launcher.kill-restore")
	for _, pid := range below {
		_ = unix.Kill(pid, unix.SIGKILL) // a descendant, which may have ended
	}
	failpoint.Reach("launcher.restore-killed")
}

// resuming completes the restored processes and records init. CRIU holds all processes meanwhile,
// and none has executed an instruction. After an error CRIU kills them.
func (b *restoreBackend) resuming() {
	if err := b.admit(); err != nil {
		b.refuse(err)
	}
}

// refuse kills CRIU and the restored processes.
func (b *restoreBackend) refuse(fault error) {
	if b.fault == nil {
		b.fault = fault
	}
	ctx, cancel := context.WithTimeout(context.Background(), destroyTimeout)
	defer cancel()
	b.killAll(ctx)
	if err := b.group.Kill(ctx); err != nil {
		b.fault = errors.Join(b.fault, err)
	}
}

func (b *restoreBackend) admit() error {
	if !b.ns.left {
		return errors.New("CRIU was not confined")
	}
	pid, err := b.process.Pid()
	if err != nil {
		return fmt.Errorf("find the restored init: %w", err)
	}
	b.endStep("CRIU restore, stopped")
	if err := b.completeProcesses(pid); err != nil {
		return err
	}
	if err := b.identifyInit(pid); err != nil {
		return err
	}
	if err := b.recordInit(); err != nil {
		return err
	}
	if err := b.delegateCgroup(); err != nil {
		return err
	}
	b.endStep("complete the processes")
	return b.decide() // a repetition would find the files that these processes have changed
}

// completeProcesses does what CRIU leaves out: it raises the processes' oom_score_adj, arms their
// timers, and lets their mounts follow links.
func (b *restoreBackend) completeProcesses(init int) error {
	pids, err := b.group.Procs()
	if err != nil {
		return err
	}
	criu, err := tracerOf(init)
	if err != nil {
		return err
	}
	pids = slices.DeleteFunc(pids, func(pid int) bool { return pid == criu })
	for _, pid := range pids {
		if err := b.completeProcess(pid); err != nil {
			return err
		}
	}
	return permitLinks(pids)
}

func (b *restoreBackend) completeProcess(pid int) error {
	if err := raiseOOMScore(pid, leastOOMScore(b.Spec.Process)); err != nil {
		return err
	}
	return rearmTimers(pid)
}

func (b *restoreBackend) follow() (int, *os.File, error) {
	if b.io.socket != nil {
		if err := b.io.receiveConsole(); err != nil {
			return 0, nil, err
		}
	}
	return b.started.InitPID, nil, nil
}

// destroy kills and reaps CRIU and the restored processes. libcontainer may not know them yet.
func (b *restoreBackend) destroy() error {
	b.l.endChildren(destroyTimeout)
	return b.libcontainerBackend.destroy()
}

// resumeGate calls a function when CRIU has restored all processes and is about to let them run.
// CRIU notifies libcontainer and waits for the answer. libcontainer has no callback for this
// notification. It logs each notification before it answers, so the gate is a hook of its log. If a
// version of libcontainer does not log it, the gate is never passed.
type resumeGate struct {
	check  func()
	called atomic.Bool
}

// resumeNotification is libcontainer's log message about the notification.
const resumeNotification = "notify: pre-resume"

// open makes check the function to call.
func (g *resumeGate) open(check func()) {
	g.check = check
	logrus.AddHook(g)
	logrus.SetLevel(logrus.DebugLevel)
}

// passed returns whether the function was called.
func (g *resumeGate) passed() bool { return g.called.Load() }

// Levels implements logrus.Hook.
func (g *resumeGate) Levels() []logrus.Level { return []logrus.Level{logrus.DebugLevel} }

// Fire implements logrus.Hook.
func (g *resumeGate) Fire(e *logrus.Entry) error {
	if strings.TrimSpace(e.Message) == resumeNotification && g.called.CompareAndSwap(false, true) {
		g.check()
	}
	return nil
}

// isZombie returns whether a process has ended and was not reaped.
func isZombie(pid int) bool {
	state, err := statusField(pid, "State")
	return err == nil && strings.HasPrefix(state, "Z")
}

// tracerOf returns the process that traces pid.
func tracerOf(pid int) (int, error) {
	value, err := statusField(pid, "TracerPid")
	if err != nil {
		return 0, err
	}
	tracer, err := strconv.Atoi(value)
	if err == nil && tracer == 0 {
		err = fmt.Errorf("restored process %d is not held by CRIU", pid)
	}
	return tracer, err
}

// statusField returns a field of /proc/PID/status.
func statusField(pid int, name string) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("the status of process %d has no %s", pid, name)
}
