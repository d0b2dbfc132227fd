package lsm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// errSystemPath is the error for paths that are never relabelled, such as /usr.
var errSystemPath = errors.New("system paths are never relabelled")

// systemPaths are never relabelled, because services of the host would lose access
// (CVE-2021-43816). Files below some of them may be relabelled. The SELinux library has the same
// list, but its function walks by path, so a symlink can redirect it.
var systemPaths = []string{
	"/", "/bin", "/boot", "/dev", "/etc", "/etc/passwd", "/etc/pki", "/etc/shadow", "/home", "/lib", "/lib64",
	"/media", "/opt",
	"/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/var/lib", "/var/log",
}

// labeller labels trees of files.
type labeller struct {
	attribute string // extended attribute that holds the label
	system    []string
}

// relabelHost labels path, which contains no symlinks, and everything below it. On a host without
// SELinux it does nothing.
func relabelHost(path, label string) error {
	if label == "" || !selinux.GetEnabled() {
		return nil
	}
	system := systemPaths
	if home := os.Getenv("HOME"); home != "" {
		system = append(system[:len(system):len(system)], home)
	}
	return labeller{attribute: "security.selinux", system: system}.relabel(path, label)
}

// relabel labels path and everything below it. Concurrent changes of the tree cannot redirect it
// outside. It labels path last, so that an interrupted run is not taken for a complete one.
func (l labeller) relabel(path, label string) (err error) {
	root, err := safefs.OpenHost(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	st, err := root.Stat()
	if err != nil {
		return err
	}
	if err := l.checkPath(path, st); err != nil {
		return err
	}
	if st.IsDir() {
		if err := l.relabelBelow(root, label); err != nil {
			return fmt.Errorf("below %s: %w", path, err)
		}
	}
	return l.set(root, label)
}

// checkPath refuses system paths, by name and by inode, because a bind mount or another spelling
// gives them other names.
func (l labeller) checkPath(path string, st os.FileInfo) error {
	clean := filepath.Clean(path)
	for _, system := range l.system {
		other, err := os.Stat(system)
		if clean == system || err == nil && os.SameFile(st, other) {
			return fmt.Errorf("%w: %s is %s", errSystemPath, path, system)
		}
		// A policy that confines berth hides files such as /etc/shadow, whatever their names.
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
			return fmt.Errorf("stat system path: %w", err)
		}
	}
	return nil
}

// relabelBelow labels everything below the directory root. It skips files that cannot have labels.
func (l labeller) relabelBelow(root *os.File, label string) (err error) {
	walk, err := safefs.NewWalk(root, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, walk.Close()) }()
	for {
		e, err := walk.Next()
		if errors.Is(err, io.EOF) {
			return walk.Incomplete()
		}
		if err != nil {
			return err
		}
		if err := l.relabelEntry(e, label); err != nil && !safefs.IsGone(err) && !errors.Is(err, unix.ENOTSUP) {
			return err
		}
	}
}

func (l labeller) relabelEntry(e safefs.Entry, label string) error {
	f, err := e.Open()
	if err != nil {
		return err
	}
	return errors.Join(l.set(f, label), f.Close())
}

// set labels exactly the open file, even a symlink. It does not write a label that the file already
// has.
func (l labeller) set(f *os.File, label string) error {
	// Before Linux 6.13, which has setxattrat(2), an O_PATH descriptor can only be addressed
	// through the process's own link to it.
	own := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
	present := make([]byte, len(label)+2)
	if n, err := unix.Getxattr(own, l.attribute, present); err == nil && unix.ByteSliceToString(present[:n]) == label {
		return nil
	}
	for {
		err := unix.Setxattr(own, l.attribute, []byte(label), 0)
		if err == nil {
			return nil
		}
		if err != unix.EINTR {
			return fmt.Errorf("set %s of %s to %s: %w", l.attribute, f.Name(), label, err)
		}
	}
}
