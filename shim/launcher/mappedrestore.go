package launcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/rpc"
	"github.com/moby/sys/capability"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/safefs"
	"berth/shim/launcher/criu"
	"berth/shim/proto"
)

// mappedRestore makes a container of a pod with a user namespace from a checkpoint. CRIU runs in
// that namespace as its root, and has no right outside of it. So whoever takes over CRIU, or a
// process that it restores, gets only the rights of root in the pod's user namespace.
//
// libcontainer makes the container as a new one, with all mounts and its cgroup. Its init never
// executes the command. It only holds the namespaces. CRIU runs in a room (enterRoom), in the
// container's user, network, IPC, UTS and cgroup namespaces. The processes that it restores join
// the container's mount namespace, and get a PID namespace of their own. Then libcontainer's init
// ends, and the restored init takes its place in libcontainer's state.
//
// This process does not trust messages of CRIU, see answer.
type mappedRestore struct {
	restoreBackend
	holder   int // libcontainer's init
	restored int // the restored init; 0: not known yet
	steps    int // how many of restoreSteps CRIU has reported
}

func (b *mappedRestore) prepare() error {
	if err := b.libcontainerBackend.prepare(); err != nil {
		return err
	}
	if err := b.checkRestorable(); err != nil {
		return err
	}
	// libcontainer's init looks for the command, which the container may have removed.
	b.process.Args, b.process.Cwd = []string{"/proc/self/exe"}, "/"
	return b.checkStructure()
}

// checkRestorable refuses settings that a restore in a user namespace does not support.
func (b *mappedRestore) checkRestorable() error {
	unsupported := ""
	switch {
	case b.Terminal:
		unsupported = "a terminal"
	case !b.privatePIDs():
		unsupported = "a shared PID namespace"
	}
	for _, m := range b.config.Mounts {
		place := filepath.Clean(m.Destination)
		if isBelow(place, procPlace) || m.Device == "proc" && place != procPlace {
			unsupported = "the mount at " + place
		}
	}
	if unsupported == "" {
		return nil
	}
	return proto.Errorf(proto.FailedPrecondition, "a restore in a user namespace does not support %s", unsupported)
}

// create makes the container. Its init is not the one that the monitor follows.
func (b *mappedRestore) create() (pid int, err error) {
	b.holder, err = b.libcontainerBackend.create()
	return 0, err
}

// execute restores the processes and lets them run.
func (b *mappedRestore) execute() error {
	streams, err := b.inheritedStreams()
	if err != nil {
		return err
	}
	// CRIU ends its helpers with SIGTERM. Unlike SIG_IGN, a handler does not survive execve.
	signal.Notify(make(chan os.Signal, 1), proto.IgnoredSignals...)
	defer signal.Ignore(proto.IgnoredSignals...)
	room, err := b.startCRIU()
	if err != nil {
		return err
	}
	defer room.work.Close() // it was only read
	err = b.restore(room, streams)
	b.endStep("CRIU restore")
	return err
}

// roomCRIU is a CRIU in a room.
type roomCRIU struct {
	*criu.Process
	work *os.File // the directory of CRIU's log
}

// startCRIU starts CRIU on another thread, which ends in CRIU's mount namespace.
func (b *mappedRestore) startCRIU() (room roomCRIU, err error) {
	command, err := b.commandInNamespaces()
	if err != nil {
		return roomCRIU{}, err
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- func() (err error) {
			if err := b.joinKeyring(); err != nil {
				return err
			}
			if err := b.coverProc(); err != nil {
				return err
			}
			if room.work, err = b.enterRoom(); err != nil {
				return err
			}
			if room.Process, err = b.startInRoom(command); err != nil {
				return errors.Join(err, room.work.Close())
			}
			return nil
		}()
	}()
	err = <-done
	return room, err
}

// restore has CRIU restore the processes.
func (b *mappedRestore) restore(room roomCRIU, streams []*rpc.InheritFd) error {
	b.lost = make(chan struct{})
	err := b.watchCRIU(room.PID())
	stop := b.watch()
	failpoint.Reach("launcher.mapped-restore")
	if err == nil {
		err = b.converse(room.Process, streams)
	}
	room.Hangup()
	b.waiting.Wait()
	if errors.Is(err, criu.ErrRefused) {
		err = criu.ErrRefused
	}
	if err := b.verdict(stop(), err, func() string { return roomCause(room.work) }); err != nil {
		return err
	}
	failpoint.Reach("launcher.mapped-restored")
	// It is in memory (/run) and of no use now. If that fails, it ends with the container.
	_ = os.Remove(b.workDir())
	return nil
}

// roomCause returns the first error in CRIU's log. CRIU may have made anything there.
func roomCause(work *os.File) string {
	dir, err := safefs.OpenDir(work, "")
	if err != nil {
		return ""
	}
	defer dir.Close() // it was only read
	log, err := dir.OpenRegular(criuLog, os.O_RDONLY)
	if err != nil {
		return ""
	}
	defer log.Close() // it was only read
	return firstError(log)
}

// inheritedStreams returns the streams with which CRIU replaces the saved streams of the processes.
func (b *mappedRestore) inheritedStreams() (streams []*rpc.InheritFd, err error) {
	root, err := safefs.OpenRoot(b.Restore.Images)
	if err != nil {
		return nil, err
	}
	defer root.Close() // it was only read
	dir, err := safefs.OpenDir(root, "")
	if err != nil {
		return nil, err
	}
	defer dir.Close() // it was only read
	file, err := dir.OpenRegular(descriptorsFile, os.O_RDONLY)
	if err != nil {
		return nil, refusal(err)
	}
	defer file.Close() // it was only read
	var names []string
	if err := json.NewDecoder(file).Decode(&names); err != nil {
		return nil, fmt.Errorf("%s of the checkpoint: %w", descriptorsFile, err)
	}
	for fd, name := range names[:min(len(names), 3)] {
		if strings.HasPrefix(name, "pipe:") {
			streams = append(streams, &rpc.InheritFd{Key: ptr(name), Fd: ptr(int32(fd))})
		}
	}
	return streams, nil
}

// commandInNamespaces returns the command that runs CRIU in the container's namespaces, with the
// capabilities there that the restore or the container needs. The programs nsenter and setpriv of
// util-linux do it, because a Go program has several threads, and such a program cannot enter a
// user namespace.
func (b *mappedRestore) commandInNamespaces() ([]string, error) {
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		return nil, proto.Errorf(proto.FailedPrecondition, "a restore in a user namespace needs nsenter of util-linux: %v", err)
	}
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		return nil, proto.Errorf(proto.FailedPrecondition, "a restore in a user namespace needs setpriv of util-linux: %v", err)
	}
	needed := slices.DeleteFunc(slices.Clone(restoringRights), func(c capability.Cap) bool {
		return slices.Contains(uselessInside, c)
	})
	drop, err := b.needless(needed)
	if err != nil {
		return nil, err
	}
	command := []string{nsenter, "--target", strconv.Itoa(b.holder), "--user", "--net", "--ipc", "--uts", "--cgroup",
		"--setuid", "0", "--setgid", "0", "--", setpriv}
	if len(drop) > 0 {
		var names []string
		for _, c := range drop {
			names = append(names, "-"+strings.ToLower(c.String()))
		}
		command = append(command, "--bounding-set", strings.Join(names, ","))
	}
	program, err := b.program()
	if err != nil {
		return nil, err
	}
	return append(command, "--", program, "swrk", "3"), nil
}

// program returns the path of CRIU without symbolic links. A room has no links to it in other
// directories than its own.
func (b *mappedRestore) program() (string, error) { return filepath.EvalSymlinks(b.Restore.CRIU) }

// containerMounts is CRIU's descriptor of the container's mount namespace.
const containerMounts = 4

// startInRoom starts CRIU in this thread's mount namespace and in the container's cgroup. It waits
// for its request.
func (b *mappedRestore) startInRoom(command []string) (*criu.Process, error) {
	mounts, err := b.mounts()
	if err != nil {
		return nil, err
	}
	defer mounts.Close() // Close of a namespace cannot fail
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Env = "/", []string{}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = b.process.Stdin, b.process.Stdout, b.process.Stderr
	failpoint.Reach("launcher.start-in-room")
	process, err := criu.StartCommand(cmd, mounts)
	failpoint.Reach("launcher.started-in-room")
	if err != nil {
		return nil, err
	}
	for _, dir := range b.group.Paths() {
		if err := cgroups.WriteCgroupProc(dir, process.PID()); err != nil {
			process.Hangup()
			return nil, fmt.Errorf("move CRIU to the container's cgroup: %w", err)
		}
	}
	return process, nil
}

// converse asks CRIU for the restore and answers its questions.
func (b *mappedRestore) converse(process *criu.Process, streams []*rpc.InheritFd) error {
	opts := &rpc.CriuOpts{
		ImagesDirFd:       ptr(int32(-1)),
		ImagesDir:         ptr(roomImages),
		ConfigFile:        ptr(roomConfig),
		LogLevel:          ptr(int32(4)),
		LogFile:           ptr(criuLog),
		Unprivileged:      ptr(true),
		RstSibling:        ptr(true),
		EvasiveDevices:    ptr(true),
		NotifyScripts:     ptr(true),
		ManageCgroups:     ptr(true),
		ManageCgroupsMode: ptr(rpc.CriuCgMode_IGNORE), // it is in the container's
		FileLocks:         ptr(true),
		ExtUnixSk:         ptr(true),
		TcpClose:          ptr(true),
		JoinNs: []*rpc.JoinNamespace{
			{Ns: ptr("mnt"), NsFile: ptr(fmt.Sprintf("/proc/self/fd/%d", containerMounts))},
		},
		InheritFd: streams,
	}
	if profile := b.profile(); profile != "" {
		opts.LsmProfile = ptr(profile)
	}
	return process.Restore(opts, func(notify *rpc.CriuNotify) error {
		err := b.answer(notify)
		if err != nil {
			b.refuse(err)
		}
		return err
	})
}

// restoreSteps are the steps of CRIU at which something is due, in their order.
var restoreSteps = []string{"setup-namespaces", "post-setup-namespaces", "pre-resume"}

// answer takes the action for a step of CRIU. An attacker may have taken over CRIU, so the process
// that a step names must be this process's child, in the pod's user namespace.
func (b *mappedRestore) answer(notify *rpc.CriuNotify) error {
	due, err := b.takeStep(notify.GetScript())
	if err != nil || !due {
		return err
	}
	switch b.steps {
	case 1:
		pid := int(notify.GetPid())
		if err := b.checkRestored(pid); err != nil {
			return err
		}
		b.restored = pid
		return nil
	case 2:
		return b.replaceProc(b.restored)
	}
	b.gate.called.Store(true)
	return b.admitMapped(b.restored)
}

// takeStep reports whether something is due at a step. It refuses a repeated or missing step. After
// the last step libcontainer's init has ended, and any process of the node may have its PID.
func (b *mappedRestore) takeStep(script string) (due bool, err error) {
	at := slices.Index(restoreSteps, script)
	switch {
	case at < 0:
		return false, nil
	case at < b.steps:
		return false, fmt.Errorf("CRIU reports the step %q again", script)
	case at > b.steps:
		return false, fmt.Errorf("CRIU reports the step %q before %q", script, restoreSteps[b.steps])
	}
	b.steps++
	return true, nil
}

// checkRestored accepts only a child of this process that is process 1 of a PID namespace in the
// pod's user namespace. Its PID cannot be reused, because only this process could reap it.
func (b *mappedRestore) checkRestored(pid int) error {
	parent, err := parentOf(pid)
	if err != nil {
		return err
	}
	numbers, err := statusField(pid, "NSpid")
	if err != nil {
		return err
	}
	inside, err := b.isInside(pid)
	if err != nil {
		return err
	}
	list := strings.Fields(numbers)
	if parent != os.Getpid() || pid == b.holder || !inside || len(list) < 2 || list[len(list)-1] != "1" {
		return fmt.Errorf("CRIU has named process %d as the restored init", pid)
	}
	return nil
}

// isInside reports whether a process is in the pod's user namespace.
func (b *mappedRestore) isInside(pid int) (bool, error) {
	var pod, process unix.Stat_t
	if err := unix.Stat(b.config.Namespaces.PathOf(configs.NEWUSER), &pod); err != nil {
		return false, os.NewSyscallError("stat", err)
	}
	err := unix.Stat(fmt.Sprintf("/proc/%d/ns/user", pid), &process)
	return process.Dev == pod.Dev && process.Ino == pod.Ino, os.NewSyscallError("stat", err)
}

// admitMapped completes the restored processes, ends libcontainer's init, and records the restored
// init in its place. CRIU holds all processes meanwhile.
func (b *mappedRestore) admitMapped(pid int) error {
	b.endStep("CRIU restore, stopped")
	if err := b.endHolder(); err != nil {
		return err
	}
	pids, err := b.group.Procs()
	if err != nil {
		return err
	}
	tracer, err := tracerOf(pid)
	if err != nil {
		return err
	}
	pids = slices.DeleteFunc(pids, func(pid int) bool { return pid == tracer || isZombie(pid) })
	for _, pid := range pids {
		inside, err := b.isInside(pid)
		if err == nil && !inside {
			err = fmt.Errorf("process %d is not in the pod's user namespace", pid)
		}
		if err == nil {
			err = b.completeProcess(pid)
		}
		if err != nil {
			return err
		}
	}
	if err := inMounts(pid, func([]*mountinfo.Info) error { return followLinks() }); err != nil {
		return err
	}
	if err := b.recordRestored(pid); err != nil {
		return err
	}
	if err := b.identifyInit(pid); err != nil {
		return err
	}
	if err := b.recordInit(); err != nil {
		return err
	}
	b.endStep("complete the processes")
	return b.decide() // a repetition would find the files that these processes have changed
}

// endHolder ends libcontainer's init. The processes that CRIU holds keep the namespaces.
func (b *mappedRestore) endHolder() error {
	failpoint.Reach("launcher.end-holder")
	if err := b.process.Signal(unix.SIGKILL); err != nil {
		return fmt.Errorf("end libcontainer's init: %w", err)
	}
	_, _ = b.process.Wait() // the result only says that it was killed
	failpoint.Reach("launcher.holder-ended")
	return nil
}

// Files of a container in libcontainer's state directory.
const (
	stateFile = "state.json"
	startFifo = "exec.fifo" // while it exists, init waits for the start
)

// recordRestored makes a process the init of libcontainer's container.
func (b *mappedRestore) recordRestored(pid int) error {
	state, err := b.container.State()
	if err != nil {
		return fmt.Errorf("read libcontainer's state: %w", err)
	}
	state.InitProcessPid = pid
	if state.InitProcessStartTime, err = pidfd.StartTime(pid); err != nil {
		return err
	}
	for kind := range state.NamespacePaths {
		state.NamespacePaths[kind] = fmt.Sprintf("/proc/%d/ns/%s", pid, configs.NsName(kind))
	}
	dir := filepath.Join(b.l.settings.StateRoot, b.ID)
	data, err := json.Marshal(state)
	if err != nil {
		return err
	}
	failpoint.Reach("launcher.record-restored")
	if err := os.WriteFile(filepath.Join(dir, "restored.json"), data, 0o600); err != nil {
		return fmt.Errorf("record the restored init: %w", err)
	}
	err = errors.Join(os.Rename(filepath.Join(dir, "restored.json"), filepath.Join(dir, stateFile)),
		os.Remove(filepath.Join(dir, startFifo)))
	failpoint.Reach("launcher.restored-recorded")
	if err != nil {
		return fmt.Errorf("record the restored init: %w", err)
	}
	b.container, err = libcontainer.Load(b.l.settings.StateRoot, b.ID)
	return err
}
