package launcher

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/opencontainers/runc/libcontainer/exeseal"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/proto"
)

// procPlace is where a container has its proc filesystem.
const procPlace = "/proc"

// hiding is the mount option with which /proc shows only the processes that its reader may trace
// (Linux 5.8). For root of a user namespace, these are the processes of the namespace.
const hiding = "hidepid=4"

// coverProc mounts the node's proc filesystem over /proc in the container's mount namespace. CRIU's
// first task mounts proc filesystems there. In a user namespace the kernel permits a new proc mount
// only if an unmasked proc filesystem is visible. This thread returns to its mount namespace.
func (b *mappedRestore) coverProc() error {
	own, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return err
	}
	defer own.Close() // Close of a namespace cannot fail
	inside, err := b.mounts()
	if err != nil {
		return err
	}
	defer inside.Close() // Close of a namespace cannot fail
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(int(inside.Fd()), unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns", err)
	}
	failpoint.Reach("launcher.cover-proc")
	err = unix.Mount("proc", procPlace, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, hiding)
	failpoint.Reach("launcher.proc-covered")
	if err == nil {
		err = refuseLinks()
	}
	return errors.Join(err, os.NewSyscallError("setns", unix.Setns(int(own.Fd()), unix.CLONE_NEWNS)))
}

// refuseLinks prevents that mounts of this thread's namespace follow symbolic links while CRIU
// opens files. proc and the root filesystem are exceptions, see links.go. followLinks reverts it.
func refuseLinks() error {
	failpoint.Reach("launcher.refuse-links")
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSYMFOLLOW}
	err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &attr)
	attr = unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NOSYMFOLLOW}
	for _, place := range []string{"/", procPlace} {
		if err == nil {
			err = unix.MountSetattr(unix.AT_FDCWD, place, 0, &attr)
		}
	}
	failpoint.Reach("launcher.links-refused")
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		return proto.Errorf(proto.FailedPrecondition, "a restore needs Linux 5.14 or later")
	}
	return os.NewSyscallError("mount_setattr", err)
}

// replaceProc gives the container the proc filesystem of the PID namespace of its restored init,
// with the paths that the spec masks or makes read-only. No restored process has executed an
// instruction or opened a file yet. berth-shim mounts it from that PID namespace, because the
// kernel mounts the proc filesystem of the caller's PID namespace.
func (b *mappedRestore) replaceProc(init int) error {
	program, err := exeseal.CloneSelfExe("")
	if err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	defer program.Close() // it was only executed
	inside, err := b.mounts()
	if err != nil {
		return err
	}
	defer inside.Close() // Close of a namespace cannot fail
	args := append([]string{proto.ReplaceProc}, b.protectedProc()...)
	cmd := exec.Command("/proc/self/fd/"+strconv.Itoa(int(program.Fd())), args...)
	cmd.ExtraFiles = []*os.File{inside}
	failpoint.Reach("launcher.replace-proc")
	err = runInPIDNamespace(fmt.Sprintf("/proc/%d/ns/pid", init), cmd)
	failpoint.Reach("launcher.proc-replaced")
	if err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	return nil
}

// mounts opens the container's mount namespace.
func (b *mappedRestore) mounts() (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/%d/ns/mnt", b.holder))
}

// Prefixes of the arguments of ReplaceProc. They say what to do with a path.
const (
	maskPath     = "mask:"
	readOnlyPath = "read-only:"
)

// protectedProc returns the arguments of ReplaceProc.
func (b *mappedRestore) protectedProc() (args []string) {
	add := func(prefix string, paths []string) {
		for _, path := range paths {
			if path = filepath.Clean(path); isBelow(path, procPlace) {
				args = append(args, prefix+path)
			}
		}
	}
	add(maskPath, b.config.MaskPaths)
	add(readOnlyPath, b.config.ReadonlyPaths)
	return args
}

// ReplaceProc replaces /proc in the mount namespace of file descriptor 3. The new /proc is that of
// this process's PID namespace. It then protects the paths in args. It is the program of
// replaceProc.
func ReplaceProc(args []string) error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Setns(3, unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("setns", err)
	}
	proc, err := newProc()
	if err != nil {
		return err
	}
	defer unix.Close(proc) // Close of a mount loses nothing
	failpoint.Reach("launcher.unmount-proc")
	for range 2 { // the mount of coverProc, and the mount of libcontainer with the mounts on it
		if err := unix.Unmount(procPlace, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", procPlace, err)
		}
	}
	if err := unix.MoveMount(proc, "", unix.AT_FDCWD, procPlace, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	for _, arg := range args {
		if err := protect(arg); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%s: %w", arg, err)
		}
	}
	failpoint.Reach("launcher.new-proc-mounted")
	return nil
}

// newProc returns a mount of the proc filesystem of this process's PID namespace. The mount
// namespace belongs to a user namespace, so the kernel allows it only while the mount of coverProc
// is visible.
func newProc() (int, error) {
	fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("open proc: %w", err)
	}
	defer unix.Close(fs)
	if err := errors.Join(unix.FsconfigSetString(fs, "source", "proc"), unix.FsconfigCreate(fs)); err != nil {
		return 0, fmt.Errorf("create proc: %w", err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC,
		unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return 0, fmt.Errorf("mount proc: %w", err)
	}
	return mount, nil
}

// protect masks a path or makes it read-only, as libcontainer does for a new container.
func protect(arg string) error {
	if path, found := strings.CutPrefix(arg, readOnlyPath); found {
		return makeReadOnly(path)
	}
	path := strings.TrimPrefix(arg, maskPath)
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err
	}
	failpoint.Reach("launcher.mask-path")
	defer failpoint.Reach("launcher.path-masked")
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return unix.Mount("tmpfs", path, "tmpfs", unix.MS_RDONLY, "size=4k,nr_inodes=1")
	}
	return unix.Mount(os.DevNull, path, "", unix.MS_BIND, "")
}

func makeReadOnly(path string) error {
	failpoint.Reach("launcher.make-read-only")
	if err := unix.Mount(path, path, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	failpoint.Reach("launcher.read-only-made")
	return setReadOnly(path, unix.AT_RECURSIVE, true)
}
