// Package lockfile makes sure that one process at a time uses a directory (Acquire), or changes something (Wait).
//
// # Contract
//
// A lock is a flock(2) on a file. It ends with the process that holds it, however
// that ends, and no process it starts inherits it. The file holds the pid of the
// last holder for the message others get; it is never removed, since removing it
// would let two processes lock two files of the same name. Where somebody else removes
// it Wait makes it anew; only he who has the old one does not know.
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

// Lock is a lock that is held.
type Lock struct{ file *os.File }

// patience is how long Acquire waits. A child of a holder that was killed, between fork
// and exec, has the lock for a moment longer than its parent lives.
const patience = 500 * time.Millisecond

// Acquire takes the lock at path. If another process has it and does not give it up
// within patience, the error has code FailedPrecondition and names that process.
func Acquire(path string) (*Lock, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	readOnly := errors.Is(err, unix.EROFS)
	if readOnly { // a lock needs no more than a file
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
	if err := sign(file); err != nil && !readOnly && !errors.Is(err, unix.ENOSPC) { // it is held, if without a name
		return nil, errors.Join(fmt.Errorf("write pid into lock %s: %w", path, err), file.Close())
	}
	return &Lock{file}, nil
}

func lock(file *os.File) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			return err
		}
	}
}

// Mode is how a lock is held.
type Mode int

// Modes: by one, or by any number who keep out only those that want it for themselves.
const (
	Exclusive Mode = unix.LOCK_EX
	Shared    Mode = unix.LOCK_SH
)

// Wait takes the lock at path as soon as nobody has it, in this process or another, or gives up when ctx ends, whose error it wraps then.
// The file's content is left alone. If somebody has deleted the file while it was waited for, the lock is the new file; a directory
// that was deleted must have been made again by then.
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
			return func() { file.Close() }, nil // the lock goes with the descriptor
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

// isAt tells whether a file is still that at path.
func isAt(file *os.File, path string) (bool, error) {
	have, err := file.Stat()
	if err != nil {
		return false, fmt.Errorf("look at lock: %w", err)
	}
	there, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at lock: %w", err)
	}
	return os.SameFile(have, there), nil
}

// Check tells why Wait could not take the lock at path, however long it waits, or nil. It makes no file, and does not wait.
func Check(path string) error {
	return check(path, func(file *os.File) error {
		err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return &os.PathError{Op: "flock", Path: path, Err: err}
		}
		return nil
	})
}

// CheckShared tells why Wait could not share the lock at path until ctx ends, or nil: who has it for himself may be stuck. It makes no file.
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

// Release gives the lock up.
func (l *Lock) Release() error { return l.file.Close() }

// sign replaces the file's content by our pid.
func sign(file *os.File) error {
	if err := file.Truncate(0); err != nil {
		return err
	}
	_, err := file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

// holder names the process whose pid the file holds. It may have locked the file
// without having signed it yet.
func holder(file *os.File) string {
	var text [16]byte
	n, _ := file.ReadAt(text[:], 0) // short by design; what matters is whether it is a pid
	pid, err := strconv.Atoi(string(bytes.TrimSpace(text[:n])))
	if err != nil || pid <= 0 {
		return "another process"
	}
	return "process " + strconv.Itoa(pid)
}
