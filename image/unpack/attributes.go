package unpack

import (
	"archive/tar"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// XattrRecord is the prefix of the PAX records for extended attributes (star,
// GNU tar, Go).
const XattrRecord = "SCHILY.xattr."

// ModeBits are the permissions with setuid, setgid and sticky.
const ModeBits = 0o7777

// fileAttributes sets the attributes of a regular file that was created with the permissions of its
// entry and filled. The order matters, because chown clears setuid, setgid and file capabilities,
// and an ACL changes the mode. fileAttributes compares before it changes an attribute, because most
// files differ only in their times and each change is a transaction of the filesystem.
func (u *unpacker) fileAttributes(f *os.File, hdr *tar.Header) error {
	uid, gid, err := owner(hdr)
	if err != nil {
		return err
	}
	fd := int(f.Fd())
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat: %w", err)
	}
	if st.Uid != uid || st.Gid != gid { // a setgid directory determines the group
		if err := unix.Fchown(fd, int(uid), int(gid)); err != nil {
			return fmt.Errorf("chown to %d:%d: %w", uid, gid, err)
		}
	}
	err = u.xattrs(hdr, func(attr string, value []byte) error { return unix.Fsetxattr(fd, attr, value, 0) })
	if err != nil {
		return err
	}
	// The umask or the directory's default ACL may have removed some permissions.
	if mode := uint32(hdr.Mode & ModeBits); st.Mode&ModeBits != mode || len(hdr.PAXRecords) > 0 {
		if err := unix.Fchmod(fd, mode); err != nil {
			return fmt.Errorf("chmod: %w", err)
		}
	}
	if err := futimens(fd, timesOf(hdr)); err != nil {
		return fmt.Errorf("set times: %w", err)
	}
	return nil
}

// futimens sets the times of an open file. If the path is null, utimensat(2) changes the
// descriptor's file.
func futimens(fd int, times [2]unix.Timespec) error {
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&times)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// directoryAttributes is fileAttributes for a directory.
func (u *unpacker) directoryAttributes(dir *safefs.Dir, hdr *tar.Header) error {
	uid, gid, err := owner(hdr)
	if err != nil {
		return err
	}
	if err := dir.Chown("", uid, gid); err != nil {
		return err
	}
	err = u.xattrs(hdr, func(attr string, value []byte) error { return dir.Setxattr("", attr, value) })
	if err != nil {
		return err
	}
	return dir.Chmod(uint32(hdr.Mode & ModeBits))
}

// nodeAttributes is fileAttributes for a symlink or a device, which cannot be opened. A symlink has
// no mode.
func (u *unpacker) nodeAttributes(at filePlace, hdr *tar.Header, mode bool) error {
	uid, gid, err := owner(hdr)
	if err != nil {
		return err
	}
	if err := at.dir.Chown(at.name, uid, gid); err != nil {
		return err
	}
	err = u.xattrs(hdr, func(attr string, value []byte) error { return at.dir.Setxattr(at.name, attr, value) })
	if err != nil || !mode {
		return err
	}
	return at.dir.ChmodNode(at.name, uint32(hdr.Mode&ModeBits))
}

// owner returns the entry's owner. chown(2) takes 2^32-1 as "no change", so the file would still
// belong to root. A larger number would lose its upper half.
func owner(hdr *tar.Header) (uid, gid uint32, err error) {
	for _, id := range []int{hdr.Uid, hdr.Gid} {
		if id < 0 || id >= math.MaxUint32 {
			return 0, 0, refuse("owner %d:%d is outside of 0 to %d", hdr.Uid, hdr.Gid, uint32(math.MaxUint32-1))
		}
	}
	return uint32(hdr.Uid), uint32(hdr.Gid), nil
}

// maxXattrNames limits the total length of the names of a file's extended attributes, each with a
// zero byte. It is XATTR_LIST_MAX (linux/limits.h). If the names are longer, the list cannot be
// read, and overlayfs cannot copy the file.
const maxXattrNames = 64 << 10

// keptXattrs are the extended attributes of an entry that an image may set, sorted by name.
func keptXattrs(hdr *tar.Header) (kept []string, err error) {
	names := 0
	for key := range hdr.PAXRecords {
		if attr, ok := strings.CutPrefix(key, XattrRecord); ok && KeepXattr(attr) {
			names += len(attr) + 1
			kept = append(kept, attr)
		}
	}
	if names > maxXattrNames {
		return nil, refuse("the names of its extended attributes take %d bytes, more than the %d that Linux lists",
			names, maxXattrNames)
	}
	slices.Sort(kept)
	return kept, nil
}

// xattrs sets the extended attributes of an entry that an image may set.
func (u *unpacker) xattrs(hdr *tar.Header, set func(attr string, value []byte) error) error {
	kept, err := keptXattrs(hdr)
	if err != nil {
		return err
	}
	for _, attr := range kept {
		value := hdr.PAXRecords[XattrRecord+attr]
		err := set(attr, []byte(value))
		switch {
		case err == nil:
		case errors.Is(err, unix.EOPNOTSUPP):
			u.unsupported++
		case errors.Is(err, unix.EPERM) && strings.HasPrefix(attr, "user."):
			u.unsupported++ // user.* is for files and directories only, xattr(7)
		default:
			return fmt.Errorf("extended attribute %q of %d bytes: %w", attr, len(value), err)
		}
	}
	return nil
}

// KeepXattr reports whether an image may set the extended attribute, see the package doc.
func KeepXattr(attr string) bool {
	switch {
	case strings.HasPrefix(attr, "user.overlay."): // overlayfs' own, mounted with userxattr
		return false
	case strings.HasPrefix(attr, "user."):
		return true
	case attr == "security.capability", attr == "system.posix_acl_access", attr == "system.posix_acl_default":
		return true
	}
	return false
}

// setTimesOf sets the times of something that does not change any more.
func (u *unpacker) setTimesOf(dir *safefs.Dir, name string, hdr *tar.Header) error {
	t := timesOf(hdr)
	return dir.Utimes(name, t[0], t[1])
}

// timesOf returns the access time and the modification time of an entry.
func timesOf(hdr *tar.Header) [2]unix.Timespec {
	mtime := timespec(hdr.ModTime)
	atime := mtime
	if !hdr.AccessTime.IsZero() {
		atime = timespec(hdr.AccessTime)
	}
	return [2]unix.Timespec{atime, mtime}
}

// timespec converts a time; the kernel brings it into the filesystem's range.
func timespec(t time.Time) unix.Timespec {
	return unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
}
