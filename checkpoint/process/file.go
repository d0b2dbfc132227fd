package process

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"berth/checkpoint/process/archive"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// WriteArchive makes a tar of the archive in dir and replaces the file location by it. The tar is
// on the disk then. A daemon that dies meanwhile leaves no file. A symbolic link at location is
// replaced and not followed.
func WriteArchive(ctx context.Context, dir *os.File, location string) (err error) {
	parent, err := os.Open(filepath.Dir(location))
	if err != nil {
		return locationError(err)
	}
	defer parent.Close() // Sync has reported its errors
	file, err := packInPlace(ctx, dir, parent)
	if errors.Is(err, archive.ErrNotInPlace) {
		return writeFile(parent, filepath.Base(location), func(to *os.File) error { return archive.Pack(ctx, dir, to) })
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	err = publish(file, dir, parent, filepath.Base(location))
	if errors.Is(err, unix.EXDEV) { // quotas can separate directories of a mount
		return writeFile(parent, filepath.Base(location), func(to *os.File) error { return copyFile(ctx, to, file) })
	}
	return err
}

// packInPlace makes the largest file in dir the tar, so that it is written only once. The error is
// ErrNotInPlace if the tar could not get a name in the directory parent.
func packInPlace(ctx context.Context, dir, parent *os.File) (*os.File, error) {
	var from, to unix.Statx_t
	for d, st := range map[*os.File]*unix.Statx_t{dir: &from, parent: &to} {
		if err := unix.Statx(int(d.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, st); err != nil {
			return nil, &fs.PathError{Op: "statx", Path: d.Name(), Err: err}
		}
	}
	if from.Mnt_id != to.Mnt_id {
		return nil, archive.ErrNotInPlace
	}
	file, err := archive.PackInPlace(ctx, dir)
	if err != nil {
		return nil, err
	}
	failpoint.Reach("checkpoint.protect-archive")
	err = file.Chmod(0o600) // CRIU has made it readable for all
	failpoint.Reach("checkpoint.archive-protected")
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// copyFile copies the whole content of a file, until ctx ends.
func copyFile(ctx context.Context, to, from *os.File) error {
	if _, err := from.Seek(0, io.SeekStart); err != nil {
		return err
	}
	_, err := archive.CopyContext(ctx, to, from)
	return err
}

// writeFile fills a new file, syncs it, and then gives it a name in a directory.
func writeFile(parent *os.File, name string, fill func(*os.File) error) error {
	failpoint.Reach("checkpoint.make-archive")
	fd, err := unix.Openat(int(parent.Fd()), ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	failpoint.Reach("checkpoint.archive-made")
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) { // NFS and FUSE, for example
		return writeNamedFile(parent, name, fill)
	}
	if err != nil {
		return locationError(fmt.Errorf("make a file in %s: %w", parent.Name(), os.NewSyscallError("openat", err)))
	}
	file := os.NewFile(uintptr(fd), name)
	err = fill(file)
	if err == nil {
		err = publish(file, parent, parent, name)
	}
	return errors.Join(err, file.Close())
}

// publish writes a file to the disk and gives it a name in the directory parent. A daemon that dies
// may leave a file in staging, a directory on the same mount.
func publish(file, staging, parent *os.File, name string) error {
	if err := file.Sync(); err != nil {
		return err
	}
	if err := linkFile(file, staging, parent, name); err != nil {
		return err
	}
	return parent.Sync()
}

// writeNamedFile is writeFile for a filesystem without O_TMPFILE. A daemon that dies meanwhile
// leaves a hidden file.
func writeNamedFile(parent *os.File, name string, fill func(*os.File) error) error {
	temporary := temporaryName()
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_CLOEXEC
	failpoint.Reach("checkpoint.make-named")
	fd, err := unix.Openat(int(parent.Fd()), temporary, flags, 0o600)
	failpoint.Reach("checkpoint.named-made")
	if err != nil {
		return fmt.Errorf("make a file in %s: %w", parent.Name(), os.NewSyscallError("openat", err))
	}
	file := os.NewFile(uintptr(fd), temporary)
	err = fill(file)
	if err == nil {
		err = file.Sync()
	}
	err = errors.Join(err, file.Close())
	if err == nil {
		failpoint.Reach("checkpoint.rename-named")
		err = os.NewSyscallError("renameat", unix.Renameat(int(parent.Fd()), temporary, int(parent.Fd()), name))
		failpoint.Reach("checkpoint.named-renamed")
	}
	if err != nil {
		failpoint.Reach("checkpoint.remove-named")
		err = errors.Join(err, os.NewSyscallError("unlinkat", unix.Unlinkat(int(parent.Fd()), temporary, 0)))
		failpoint.Reach("checkpoint.named-removed")
		return err
	}
	return parent.Sync()
}

// newName returns a new name of 64 hex digits.
func newName() string {
	var b [32]byte
	rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}

// temporaryName returns a new name of a hidden file.
func temporaryName() string { return "." + newName()[:16] + ".tmp" }

// locationError adds a gRPC code to an error about the client's path.
func locationError(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return errdefs.FailedPrecondition("%w", err)
	}
	return err
}

// linkFile gives a file without a name its name in a directory, in place of an existing file. Only
// a rename replaces a file, so the new one has a temporary name in staging first.
func linkFile(file, staging, dir *os.File, name string) error {
	source := fmt.Sprintf("/proc/self/fd/%d", file.Fd())
	failpoint.Reach("checkpoint.link-archive")
	err := unix.Linkat(unix.AT_FDCWD, source, int(dir.Fd()), name, unix.AT_SYMLINK_FOLLOW)
	failpoint.Reach("checkpoint.archive-linked")
	if !errors.Is(err, unix.EEXIST) {
		return os.NewSyscallError("linkat", err)
	}
	temporary := temporaryName()
	failpoint.Reach("checkpoint.link-temporary")
	if err := unix.Linkat(unix.AT_FDCWD, source, int(staging.Fd()), temporary, unix.AT_SYMLINK_FOLLOW); err != nil {
		return os.NewSyscallError("linkat", err)
	}
	failpoint.Reach("checkpoint.replace-archive")
	err = unix.Renameat(int(staging.Fd()), temporary, int(dir.Fd()), name)
	failpoint.Reach("checkpoint.archive-replaced")
	if err == nil {
		return nil
	}
	failpoint.Reach("checkpoint.remove-temporary")
	removeErr := unix.Unlinkat(int(staging.Fd()), temporary, 0)
	failpoint.Reach("checkpoint.temporary-removed")
	return errors.Join(os.NewSyscallError("renameat", err), removeErr)
}
