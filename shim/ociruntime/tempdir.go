package ociruntime

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// crun and runc bind mount their program in a temporary directory, execute the read-only copy and
// unmount it. A killed command leaves the mount behind. In /tmp, the default, it would stay on the
// host. So each command gets a separate directory, and its caller removes everything that is left
// there.

// tempDirVariable names the directory in the environment of crun and runc.
const tempDirVariable = "_LIBCONTAINER_STATEDIR"

// tempDir is the name of the directory in a bundle. The bundle is on a private mount, so a mount
// there exists only in the launcher's mount namespace.
const tempDir = "runtime-tmp"

// useBundle makes a command use tempDir in its bundle.
func useBundle(cmd *exec.Cmd, bundle string) error {
	dir := filepath.Join(bundle, tempDir)
	cmd.Env = append(cmd.Env, tempDirVariable+"="+dir)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// callPrefix begins the names of directories of commands that have no bundle. The ID of the calling
// process follows: of the daemon, or of a launcher that deletes a container.
const callPrefix = "berth-call-"

// useRoot makes a command use a new directory in the runtime's state directory. If the runtime has
// no state directory, it uses the system's directory for temporary files. remove removes the
// directory, and the directories of processes that have ended.
func (r *Runtime) useRoot(cmd *exec.Cmd) (remove func() error, err error) {
	madeRoot := false
	if r.Root != "" {
		err := os.Mkdir(r.Root, 0o700)
		if madeRoot = err == nil; err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("make state directory: %w", err)
		}
	}
	dir, err := os.MkdirTemp(r.Root, fmt.Sprintf("%s%d-", callPrefix, os.Getpid()))
	if err != nil {
		return nil, fmt.Errorf("make directory for temporary files: %w", err)
	}
	cmd.Env = append(cmd.Env, tempDirVariable+"="+dir)
	return func() error {
		err := removeTempDir(dir)
		if r.Root != "" {
			err = errors.Join(err, r.removeStaleDirs())
		}
		if madeRoot {
			_ = os.Remove(r.Root) // unless the command needs it
		}
		return err
	}, nil
}

// removeStaleDirs removes the directories of commands whose caller was killed. If another process
// has got its ID, RemoveRoot does it.
func (r *Runtime) removeStaleDirs() error {
	entries, err := os.ReadDir(r.Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var failed error
	for _, e := range entries {
		rest, isCall := strings.CutPrefix(e.Name(), callPrefix)
		pid, _, _ := strings.Cut(rest, "-")
		if !isCall {
			continue
		}
		if _, err := os.Lstat(filepath.Join("/proc", pid)); errors.Is(err, fs.ErrNotExist) {
			failed = errors.Join(failed, removeTempDir(filepath.Join(r.Root, e.Name())))
		}
	}
	return failed
}

// RemoveRoot removes the state directory of a runtime whose containers are deleted, with mounts
// that killed commands left in it.
func RemoveRoot(root string) error {
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var failed error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), callPrefix) {
			failed = errors.Join(failed, removeTempDir(filepath.Join(root, e.Name())))
		}
	}
	return errors.Join(failed, os.RemoveAll(root))
}

// removeTempDir removes the directory of a command that has ended, with mounts that are left in it.
// A missing directory is no error.
func removeTempDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries { // EINVAL: not a mount point
		_ = unix.Unmount(filepath.Join(dir, entry.Name()), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	return os.RemoveAll(dir)
}
