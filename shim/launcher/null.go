package launcher

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// newNull creates and opens a null device for one process. A process can change the mode and owner
// of a device node through a descriptor. With the host's node, it could make /dev/null unusable on
// the host.
//
// The node is /dev/null of a new tmpfs that is attached to no mount namespace and disappears with
// the last descriptor. It has the name that programs expect, and no file handle leads to another
// process's node.
func newNull() (_ *os.File, err error) {
	root, err := newTmpfs()
	if err != nil {
		return nil, fmt.Errorf("make null device: %w", err)
	}
	defer root.Close()
	dir := int(root.Fd())
	failpoint.Reach("launcher.make-null")
	if err := unix.Mkdirat(dir, "dev", 0o755); err != nil {
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("mkdirat", err))
	}
	if err := unix.Mknodat(dir, "dev/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("mknodat", err))
	}
	if err := unix.Fchmodat(dir, "dev/null", 0o666, 0); err != nil { // mknod obeys the umask
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("fchmodat", err))
	}
	fd, err := unix.Openat(dir, "dev/null", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("openat", err))
	}
	failpoint.Reach("launcher.null-made")
	null := os.NewFile(uintptr(fd), os.DevNull)
	if err := copyLabel(os.DevNull, null); err != nil {
		return nil, errors.Join(fmt.Errorf("make null device: %w", err), null.Close())
	}
	return null, nil
}

// newTmpfs mounts a tmpfs that is attached to no mount namespace.
func newTmpfs() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(fd), "tmpfs"), nil
}

// seLinuxLabel is the extended attribute with a file's SELinux label.
const seLinuxLabel = "security.selinux"

// copyLabel copies the SELinux label of a file that all containers may use. It does nothing without
// SELinux.
func copyLabel(from string, to *os.File) error {
	label := make([]byte, 256)
	n, err := unix.Getxattr(from, seLinuxLabel, label)
	if err == unix.ENODATA || err == unix.ENOTSUP {
		return nil
	}
	if err != nil {
		return fmt.Errorf("copy SELinux label: %w", err)
	}
	failpoint.Reach("launcher.label-null")
	if err := unix.Fsetxattr(int(to.Fd()), seLinuxLabel, label[:n], 0); err != nil {
		return fmt.Errorf("copy SELinux label: %w", err)
	}
	failpoint.Reach("launcher.null-labelled")
	return nil
}
