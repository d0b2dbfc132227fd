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

// errSystemPath is what Relabel returns for paths that are never labelled anew, such as /usr.
var errSystemPath = errors.New("a path of the system keeps its label")

// systemPaths are never labelled anew (CVE-2021-43816): what runs on the host would lose its
// access. What is in some of them may be. They are those of the SELinux library, whose own function
// walks by paths.
var systemPaths = []string{
	"/", "/bin", "/boot", "/dev", "/etc", "/etc/passwd", "/etc/pki", "/etc/shadow", "/home", "/lib", "/lib64", "/media", "/opt",
	"/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/var/lib", "/var/log",
}

// labeller labels trees of files.
type labeller struct {
	attribute string // extended attribute that is the label
	system    []string
}

// relabelHost labels path, which has no symlinks, and all below it. Without SELinux it does
// nothing.
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

// relabel labels path and all below it. Nothing outside is reached, whatever somebody changes there
// meanwhile. path comes last, so that what was interrupted is not taken for done.
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

// checkPath refuses paths of the system, by name and by what is there: a bind mount or another
// spelling gives them other names.
func (l labeller) checkPath(path string, st os.FileInfo) error {
	clean := filepath.Clean(path)
	for _, system := range l.system {
		other, err := os.Stat(system)
		if clean == system || err == nil && os.SameFile(st, other) {
			return fmt.Errorf("%w: %s is %s", errSystemPath, path, system)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("look for paths of the system: %w", err)
		}
	}
	return nil
}

// relabelBelow labels all below root, a directory. Files that can't have labels are left as they
// are.
func (l labeller) relabelBelow(root *os.File, label string) (err error) {
	walk, err := safefs.NewWalk(root, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, walk.Close()) }()
	for {
		e, err := walk.Next()
		if err == io.EOF {
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

// set labels the very file that is open, also a symlink. A label that it has already is not written
// again.
func (l labeller) set(f *os.File, label string) error {
	// A descriptor without access (O_PATH) is reached by the process's own link to it only, before
	// setxattrat(2) of Linux 6.13.
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
