// Package jail runs programs that parse hostile input, confined to the files below one directory.
//
// # Contract
//
// The daemon starts a program with Start or Run and reads its answer within limits. The program's
// main function is Main, and its first step is Process. An answer comes from a program that hostile
// input may control, so the daemon decodes it strictly.
//
// After Process, a process, even if it runs hostile code,
//
//   - sees one tree of files as its root directory and nothing outside. (Its working
//     directory is its own /proc/self/fd, for package safefs.) The daemon passes
//     the tree as a detached mount without devices and set-id programs.
//   - may change owners, modes and types of the files there (CAP_CHOWN, DAC_OVERRIDE,
//     FOWNER, FSETID, MKNOD, SETFCAP). It has no other capabilities and cannot get any.
//   - that packs a layer (Grant.OnlyData) may only read and write its inherited files, and has no
//     capability.
//   - that verifies (Grant.ReadOnly) may only read files, and has no capability.
//   - may make only the system calls of Go's runtime and of its grant: no
//     sockets, programs, namespaces or signals. (This holds on the architectures of FiltersCalls.
//     On others berth warns.)
//   - has limits for memory, descriptors, file size and CPU time, and is the first
//     process that the OOM killer takes.
//
// Start creates the namespaces. Landlock would not restrict more than the root directory does. It
// took 6 % more CPU time for a distribution's layer.
//
// berth-unpack links this package and is started for every layer, so it imports little.
package jail

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// Grant limits a process.
type Grant struct {
	Memory   uint64 // bytes of writable memory of its own
	FileSize uint64 // bytes of one file
	Files    uint64 // open files
	CPU      uint64 // seconds of CPU time; then it is killed
	OnlyData bool   // it opens and makes no file, and has no capability
	ReadOnly bool   // it opens files only to read, and has no capability
}

// step is one step of confining a process.
type step struct {
	name string
	do   func() error
}

// Process confines the process to tree permanently. A binary with cgo has taken some steps before
// it had threads (package early). Process checks these steps.
func Process(tree *os.File, grant Grant, early bool) error {
	steps := []step{
		{"volunteer for the OOM killer", volunteer},
		{"enter the tree", func() error { return enter(tree) }},
		{"renounce privileges", func() error { return allThreads(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0) }},
		{"give up capabilities", func() error { return dropCapabilities(grant.capabilities()) }},
	}
	if early {
		steps = []step{{"check what was done early", func() error { return checkEarly(tree) }}}
	}
	steps = append(steps, step{"limit resources", func() error { return limit(grant) }},
		step{"filter system calls", func() error { return filterCalls(grant.calls()) }})
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	safefs.DescriptorsIn("")
	return nil
}

// checkEarly returns an error unless package early has taken its steps. It suffices to check one
// thread, because the steps were taken when there was only one.
func checkEarly(tree *os.File) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return err
	}
	if sets != setsOf(kept) { // also for packing, because these capabilities are useless if the system calls are forbidden
		return fmt.Errorf("capabilities %+v", sets)
	}
	if set, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err != nil {
		return err
	} else if set != 1 {
		return errors.New("no_new_privs is not set")
	}
	var root, want unix.Stat_t
	if err := errors.Join(unix.Lstat("/", &root), unix.Fstat(int(tree.Fd()), &want)); err != nil {
		return err
	}
	if root.Dev != want.Dev || root.Ino != want.Ino {
		return errors.New("the root directory is not the tree")
	}
	return nil
}

// volunteer makes the process the OOM killer's first choice, because a pull can be repeated.
func volunteer() error {
	const first = "1000"
	return os.WriteFile("/proc/self/oom_score_adj", []byte(first), 0)
}

func limit(grant Grant) error {
	for resource, max := range map[int]uint64{
		unix.RLIMIT_CORE: 0, unix.RLIMIT_DATA: grant.Memory, unix.RLIMIT_FSIZE: grant.FileSize,
		unix.RLIMIT_NOFILE: grant.Files,
		unix.RLIMIT_CPU:    grant.CPU,
	} {
		var have unix.Rlimit
		if err := unix.Getrlimit(resource, &have); err != nil {
			return err
		}
		max = min(max, have.Max) // raising the hard limit would need CAP_SYS_RESOURCE
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: max, Max: max}); err != nil {
			return err
		}
	}
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// enter makes tree the root directory. The working directory becomes a mount that contains only the
// process's descriptors, so no path leads out of it.
func enter(tree *os.File) error {
	fds, err := unix.OpenTree(unix.AT_FDCWD, "/proc/self/fd", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("clone /proc/self/fd: %w", err)
	}
	defer unix.Close(fds) // the working directory keeps the mount
	if err := unix.Fchdir(int(tree.Fd())); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	return unix.Fchdir(fds)
}

func (g Grant) capabilities() uint64 {
	if g.OnlyData || g.ReadOnly {
		return 0
	}
	return kept
}

// calls returns the allowed system calls.
func (g Grant) calls() []uint32 {
	if g.OnlyData {
		return always
	}
	if g.ReadOnly {
		return slices.Concat(always, reads)
	}
	return slices.Concat(always, files)
}

// Capabilities that are kept to make files.
const kept = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID |
	1<<unix.CAP_MKNOD | 1<<unix.CAP_SETFCAP

// dropCapabilities ignores the bounding set, because the process cannot execute programs.
func dropCapabilities(kept uint64) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	sets := setsOf(kept)
	return allThreads(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&sets)), 0)
}

// setsOf returns the capability sets of a confined process.
func setsOf(kept uint64) (sets [2]unix.CapUserData) {
	for i := range sets {
		sets[i].Effective = uint32(kept >> (32 * i))
		sets[i].Permitted = sets[i].Effective
	}
	return sets
}

// allThreads makes a system call on every thread, because these are attributes of threads.
func allThreads(call, a, b, c uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall6(call, a, b, c, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// FiltersCalls reports whether Process filters system calls on an architecture, named as in GOARCH.
func FiltersCalls(arch string) bool { return auditArch[arch] != 0 }

// filterCalls forbids all other system calls, if FiltersCalls is true for this architecture.
func filterCalls(calls []uint32) error {
	if !FiltersCalls(runtime.GOARCH) {
		return nil
	}
	program := filter(auditArch[runtime.GOARCH], calls)
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP,
		unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return errno
	}
	if thread != 0 { // seccomp(2) has failed for one thread; then no thread has the filter
		return fmt.Errorf("thread %d cannot get the filter", thread)
	}
	return nil
}
