// Package safefs opens and creates files below a directory with untrusted content, such as a
// container's root, an image layer or a checkpoint.
//
// # Contract
//
// The kernel resolves every path as if the root were the process's root directory (openat2 with
// RESOLVE_IN_ROOT). Absolute symlinks and ".." stay inside even if the tree changes meanwhile, and
// magic links (symlinks in /proc) are not followed. No function relies on a path that was checked
// earlier. [OpenRoot] opens the root. All descriptors are close-on-exec. The package needs Linux
// 5.6.
//
// Methods of a [Dir] act on one name in that directory and do not follow a symlink there.
//
// Errors are *fs.PathError around an errno, so errors.Is works with fs.ErrNotExist and others.
package safefs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNotRegular is returned if a path is not a regular file, for example a directory, a device or a
// FIFO.
var ErrNotRegular = errors.New("not a regular file")

// ErrTooLarge is returned by [ReadFile] for a file above the caller's limit.
var ErrTooLarge = errors.New("file is too large")

// resolveInRoot are the flags for the resolution of every path of this package.
const resolveInRoot = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS

// OpenRoot opens the directory at path, a trusted path of the host, as a root for the other
// functions. The file is opened with O_PATH, so it can resolve paths, but cannot be read.
func OpenRoot(path string) (*os.File, error) {
	fd, err := openat2(unix.AT_FDCWD, path, unix.O_PATH|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open root", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// OpenHost opens path, a resolved absolute path of the host, with O_PATH. It returns ELOOP if path
// contains a symlink by now.
func OpenHost(path string) (*os.File, error) {
	fd, err := openat2(unix.AT_FDCWD, path, unix.O_PATH, 0, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Open opens path inside root with the given open(2) flags. mode has an effect only with O_CREAT.
// Open adds O_CLOEXEC, and O_NONBLOCK so that it does not wait for a FIFO or a device. An empty
// path means the root.
//
// Opening a device node can have side effects. For content that comes from an image use [ReadFile]
// or [OpenRegular].
func Open(root *os.File, path string, flags int, mode uint32) (*os.File, error) {
	fd, err := open(root, path, flags, mode)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// OpenRegular opens the regular file at path inside root for reading. It returns [ErrNotRegular]
// for other types. It checks the type before it opens the file, so that it never opens a device.
// Opening can have side effects, for example it starts a watchdog.
func OpenRegular(root *os.File, path string) (*os.File, error) {
	f, err := openRegular(root, path)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return f, nil
}

func openRegular(root *os.File, path string) (*os.File, error) {
	fd, err := open(root, path, unix.O_PATH, 0)
	if err != nil {
		return nil, err
	}
	return reopenRegular(fd, path, unix.O_RDONLY)
}

// reopenRegular opens the regular file of an O_PATH descriptor with flags. It closes the
// descriptor.
func reopenRegular(fd int, path string, flags int) (*os.File, error) {
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, ErrNotRegular
	}
	// The magic link belongs to this process and leads to the inode that was just checked.
	rfd, err := openat2(unix.AT_FDCWD, procFD(fd), flags|unix.O_NONBLOCK, 0, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(rfd), path), nil
}

// ReadFile returns the content of the regular file at path inside root. It returns [ErrNotRegular]
// for other types and [ErrTooLarge] for more than max bytes, and allocates at most max+1 bytes.
func ReadFile(root *os.File, path string, max int64) ([]byte, error) {
	f, err := OpenRegular(root, path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f, path, max)
}

// ReadHostFile is [ReadFile] for a trusted path of the host, and follows symlinks. The file may
// still be a FIFO, a device or endless.
func ReadHostFile(path string, max int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: path, Err: ErrNotRegular}
	}
	return readAll(f, path, max)
}

func readAll(f *os.File, path string, max int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(f, max+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if int64(len(data)) > max {
		return nil, &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w: more than %d bytes", ErrTooLarge, max)}
	}
	return data, nil
}

// open resolves path in root and adds the flags that every file of this package has.
func open(root *os.File, path string, flags int, mode uint32) (int, error) {
	if path == "" {
		path = "."
	}
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NONBLOCK // openat2 refuses the flag together with O_PATH
	}
	if flags&unix.O_CREAT == 0 && flags&unix.O_TMPFILE != unix.O_TMPFILE {
		mode = 0 // openat2 refuses a mode without O_CREAT
	}
	conn, err := root.SyscallConn()
	if err != nil {
		return -1, err
	}
	fd, openErr := -1, error(nil)
	if err := conn.Control(func(dir uintptr) {
		fd, openErr = openat2(int(dir), path, flags, mode, resolveInRoot)
	}); err != nil {
		return -1, err
	}
	return fd, openErr
}

// openat2 calls openat2(2) with close-on-exec. It repeats the call after a signal, and after
// EAGAIN. Resolving ".." in a root fails with EAGAIN if any rename or mount on the machine happened
// meanwhile.
func openat2(dir int, path string, flags int, mode uint32, resolve uint64) (int, error) {
	const maxRaces = 128 // on a busy machine; openat2(2) advises to try again
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Mode: uint64(mode), Resolve: resolve}
	for races := 0; ; {
		fd, err := unix.Openat2(dir, path, &how)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN && resolve != 0 && races < maxRaces:
			races++
		default:
			return fd, err
		}
	}
}
