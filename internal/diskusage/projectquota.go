package diskusage

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// ErrNoQuotas means that a filesystem has no project quotas, or does not enforce them.
var ErrNoQuotas = errors.New("no project quotas: the filesystem is not XFS or ext4 mounted with prjquota")

// Quotas limits and counts the usage of directories by the project quotas of an XFS or ext4
// filesystem.
//
// Files created in a directory inherit its project. The kernel counts the files of a project,
// including files without a name, and refuses writes beyond the limit (ENOSPC, EDQUOT). The count
// is a lower bound, because a process outside of user namespaces can move its files out of the
// project with FS_IOC_FSSETXATTR.
//
// Quotas needs quotactl_fd(2), Linux 5.14, and CAP_SYS_ADMIN.
type Quotas struct{ root *os.File }

// OpenQuotas returns the quotas of the filesystem that contains a directory. The error wraps
// ErrNoQuotas if the filesystem does not enforce project quotas.
func OpenQuotas(dir string) (*Quotas, error) {
	root, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	f := &Quotas{root: root}
	if err := f.check(); err != nil {
		return nil, errors.Join(fmt.Errorf("project quotas of %s: %w", dir, err), root.Close())
	}
	return f, nil
}

// Close closes the filesystem.
func (f *Quotas) Close() error { return f.root.Close() }

// The kernel's interface, include/uapi/linux/dqblk_xfs.h and fs.h. ext4 implements it, too.
const (
	projectType   = 2
	cmdSetLimit   = 0x5804<<8 | projectType // Q_XSETQLIM
	cmdGetQuota   = 0x5803<<8 | projectType // Q_XGETQUOTA
	cmdGetState   = 0x5808<<8 | projectType // Q_XGETQSTATV
	stateVersion  = 1                       // FS_QSTATV_VERSION1
	stateEnforced = 1 << 5                  // FS_QUOTA_PDQ_ENFD
	quotaVersion  = 1                       // FS_DQUOT_VERSION
	quotaProject  = 2                       // FS_PROJ_QUOTA
	fieldSoft     = 1 << 2                  // FS_DQ_BSOFT
	fieldHard     = 1 << 3                  // FS_DQ_BHARD
	block         = 512

	getAttributes = 0x801c581f // FS_IOC_FSGETXATTR
	setAttributes = 0x401c5820 // FS_IOC_FSSETXATTR
	inherit       = 0x200      // FS_XFLAG_PROJINHERIT
)

// quota is struct fs_disk_quota.
type quota struct {
	version                                int8
	flags                                  int8
	fields                                 uint16
	id                                     uint32
	hard, soft, inodesHard, inodesSoft     uint64
	blocks, inodes                         uint64
	_                                      [16]byte // timers and warnings
	realtimeHard, realtimeSoft, realtimeIn uint64
	_                                      [16]byte
}

// state is struct fs_quota_statv. Only its first fields are used.
type state struct {
	version int8
	_       uint8
	flags   uint16
	_       [508]byte
}

// attributes is struct fsxattr.
type attributes struct {
	flags, extentSize, extents, project, copySize uint32
	_                                             [8]byte
}

func (f *Quotas) call(cmd int, id uint32, data unsafe.Pointer) error {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, f.root.Fd(), uintptr(cmd), uintptr(id), uintptr(data), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func (f *Quotas) check() error {
	s := state{version: stateVersion}
	err := f.call(cmdGetState, 0, unsafe.Pointer(&s))
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL),
		errors.Is(err, unix.ESRCH), errors.Is(err, unix.ENOTBLK),
		errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPERM), errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w (%w)", ErrNoQuotas, err)
	case err != nil:
		return err
	case s.flags&stateEnforced == 0:
		return ErrNoQuotas
	}
	return nil
}

// Usage returns the usage of a project. It is zero for a project that was never assigned.
func (f *Quotas) Usage(id uint32) (Usage, error) {
	var q quota
	err := f.call(cmdGetQuota, id, unsafe.Pointer(&q))
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return Usage{}, fmt.Errorf("usage of project %d: %w", id, err)
	}
	return Usage{Bytes: q.blocks * block, Inodes: q.inodes}, nil
}

// SetLimit sets the limit of a project; 0 means no limit.
func (f *Quotas) SetLimit(id uint32, bytes uint64) error {
	q := quota{
		version: quotaVersion,
		flags:   quotaProject,
		fields:  fieldHard | fieldSoft,
		id:      id,
		hard:    (bytes + block - 1) / block,
	}
	failpoint.Reach("quota.set-limit")
	if err := f.call(cmdSetLimit, id, unsafe.Pointer(&q)); err != nil {
		return fmt.Errorf("limit project %d: %w", id, err)
	}
	failpoint.Reach("quota.limit-set")
	return nil
}

// AssignProject assigns an empty directory, and everything created in it, to a project.
func AssignProject(dir *os.File, id uint32) error {
	var a attributes
	if err := ioctl(dir, getAttributes, &a); err != nil {
		return fmt.Errorf("project of %s: %w", dir.Name(), err)
	}
	if a.project == id && a.flags&inherit != 0 {
		return nil
	}
	a.project, a.flags = id, a.flags|inherit
	failpoint.Reach("quota.assign")
	if err := ioctl(dir, setAttributes, &a); err != nil {
		return fmt.Errorf("assign %s to project %d: %w", dir.Name(), id, err)
	}
	failpoint.Reach("quota.assigned")
	return nil
}

func ioctl(f *os.File, request uintptr, a *attributes) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(a)))
	if errno != 0 {
		return errno
	}
	return nil
}
