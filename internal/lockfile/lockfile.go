// Package lockfile implements locks between processes. They protect the use of a directory
// (Acquire) or a single change (Wait).
//
// # Contract
//
// A lock is a flock(2) on a file. The kernel releases it when the holder exits, and child processes
// do not inherit it. The file contains the pid of the last holder, for error texts. The package
// never removes the file, because two processes could then lock two files of the same name. If
// another program removes it, Wait creates it again, but the holder of the old file does not
// notice.
package lockfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
)

// Lock is a held lock.
type Lock struct{ file *os.File }

// acquireTimeout is how long Acquire waits. After a holder was killed, its child between fork and
// exec keeps the lock for a moment.
const acquireTimeout = 500 * time.Millisecond

// Acquire takes the lock at path. If another process holds the lock for longer than acquireTimeout,
// the error has code FailedPrecondition and names the process.
func Acquire(path string) (*Lock, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	readOnly := errors.Is(err, unix.EROFS)
	if readOnly { // a read-only file suffices for a lock
		file, err = os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	err = lock(file)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = errdefs.FailedPrecondition("lock %s: %s holds it", path, holder(file))
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if err := sign(file); err != nil && !readOnly && !errors.Is(err, unix.ENOSPC) { // on a full disk the file has no pid, but the lock is held
		return nil, errors.Join(fmt.Errorf("write pid into lock %s: %w", path, err), file.Close())
	}
	return &Lock{file}, nil
}

func lock(file *os.File) error {
	for deadline := time.Now().Add(acquireTimeout); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			return err
		}
	}
}

// Mode is the mode of a lock.
type Mode int

// An exclusive lock has one holder. A shared lock has any number of holders and excludes exclusive
// ones.
const (
	Exclusive Mode = unix.LOCK_EX
	Shared    Mode = unix.LOCK_SH
)

// Wait takes the lock at path once it is free. When ctx ends first, the error wraps ctx's error.
// Wait does not change the file's content. If the file was deleted during the wait, Wait locks the
// new file, whose directory must exist by then.
func Wait(ctx context.Context, path string, mode Mode) (unlock func(), err error) {
	for {
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open lock: %w", err)
		}
		err = waitFor(ctx, file, mode)
		there := false
		if err == nil {
			there, err = isAt(file, path)
		}
		if there && err == nil {
			return func() { file.Close() }, nil // closing the descriptor unlocks
		}
		if err := errors.Join(err, file.Close()); err != nil {
			return nil, err
		}
	}
}

func waitFor(ctx context.Context, file *os.File, mode Mode) error {
	for delay := 100 * time.Microsecond; ; delay = min(2*delay, 5*time.Millisecond) {
		err := unix.Flock(int(file.Fd()), int(mode)|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return &os.PathError{Op: "flock", Path: file.Name(), Err: err}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for lock %s: %w", file.Name(), ctx.Err())
		case <-time.After(delay):
		}
	}
}

// isAt reports whether file is still the file at path.
func isAt(file *os.File, path string) (bool, error) {
	have, err := file.Stat()
	if err != nil {
		return false, fmt.Errorf("stat lock: %w", err)
	}
	there, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("stat lock: %w", err)
	}
	return os.SameFile(have, there), nil
}

// Check returns the error that prevents Wait from taking a free lock at path, or nil. It creates no
// file and does not wait.
func Check(path string) error {
	return check(path, func(file *os.File) error {
		err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return &os.PathError{Op: "flock", Path: path, Err: err}
		}
		return nil
	})
}

// CheckShared returns the error that prevents Wait from sharing the lock at path until ctx ends, or
// nil. It detects an exclusive holder that hangs. It creates no file.
func CheckShared(ctx context.Context, path string) error {
	return check(path, func(file *os.File) error { return waitFor(ctx, file, Shared) })
}

func check(path string, try func(*os.File) error) error {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		dir := filepath.Dir(path)
		if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
			return fmt.Errorf("open lock %s: %w", path, &os.PathError{Op: "access", Path: dir, Err: err})
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("open lock: %w", err)
	}
	return errors.Join(try(file), file.Close())
}

// Release unlocks.
func (l *Lock) Release() error { return l.file.Close() }

// sign replaces the file's content with this process's pid.
func sign(file *os.File) error {
	if err := file.Truncate(0); err != nil {
		return err
	}
	_, err := file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

// holder describes the process whose pid the file contains. The holder may not have written its pid
// yet.
func holder(file *os.File) string {
	var text [16]byte
	n, _ := file.ReadAt(text[:], 0) // a short read is normal; the content is checked below
	pid, err := strconv.Atoi(string(bytes.TrimSpace(text[:n])))
	if err != nil || pid <= 0 {
		return "another process"
	}
	return "process " + strconv.Itoa(pid)
}
