package lsm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// standIn is an attribute that symlinks and devices can have on a kernel without SELinux, too.
const standIn = "trusted.berth-test"

func newLabeller(t *testing.T) labeller {
	if err := unix.Setxattr(t.TempDir(), standIn, []byte("x"), 0); err != nil {
		t.Skipf("cannot set %s here: %v", standIn, err)
	}
	return labeller{attribute: standIn}
}

func labelAt(t *testing.T, path string) string {
	t.Helper()
	value := make([]byte, 100)
	n, err := unix.Lgetxattr(path, standIn, value)
	if err == unix.ENODATA {
		return ""
	}
	if err != nil {
		t.Fatalf("label of %s: %v", path, err)
	}
	return string(value[:n])
}

func makeTree(t *testing.T, dir string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(dir+"/a/b", 0o700), os.WriteFile(dir+"/a/file", nil, 0o600), os.WriteFile(dir+"/a/b/file", nil, 0o600),
		unix.Mkfifo(dir+"/fifo", 0o600)); err != nil {
		t.Fatal(err)
	}
}

// A whole tree is labelled, symlinks included, but not the targets of symlinks.
func TestRelabel(t *testing.T) {
	t.Parallel()
	l, top, outside := newLabeller(t), t.TempDir(), t.TempDir()
	makeTree(t, top)
	makeTree(t, outside)
	testutil.Must(t, errors.Join(os.Symlink(outside, top+"/dir"), os.Symlink(outside+"/a/file", top+"/a/link")))
	deep := strings.Repeat("/d", 100)
	testutil.Must(t, os.MkdirAll(top+deep, 0o700))
	for _, label := range []string{"first", "second, longer", "3rd", "3rd"} {
		testutil.Must(t, l.relabel(top, label))
		for _, name := range []string{"", "/a", "/a/file", "/a/b/file", "/fifo", "/dir", "/a/link", deep} {
			if got := labelAt(t, top+name); got != label {
				t.Errorf("%s has the label %q, want %q", name, got, label)
			}
		}
	}
	for _, name := range []string{"", "/a", "/a/file"} {
		if got := labelAt(t, outside+name); got != "" {
			t.Errorf("%s outside the tree has the label %q", name, got)
		}
	}
}

func TestRelabelFile(t *testing.T) {
	t.Parallel()
	l, top := newLabeller(t), t.TempDir()
	makeTree(t, top)
	if err := l.relabel(top+"/a/file", "label"); err != nil || labelAt(t, top+"/a/file") != "label" || labelAt(t, top+"/a") != "" {
		t.Errorf("%v, file %q, directory %q", err, labelAt(t, top+"/a/file"), labelAt(t, top+"/a"))
	}
}

// A symlink in the path was created after the path was resolved.
func TestRelabelPathWithSymlink(t *testing.T) {
	t.Parallel()
	l, top, outside := newLabeller(t), t.TempDir(), t.TempDir()
	makeTree(t, outside)
	testutil.Must(t, os.Symlink(outside, top+"/link"))
	for _, path := range []string{"/link", "/link/a"} {
		t.Run(path, func(t *testing.T) {
			if err := l.relabel(top+path, "label"); !errors.Is(err, unix.ELOOP) || labelAt(t, outside+"/a") != "" {
				t.Errorf("%v, label %q", err, labelAt(t, outside+"/a"))
			}
		})
	}
}

// System directories keep their labels under every name (CVE-2021-43816).
func TestSystemPathsKeepTheirLabels(t *testing.T) {
	t.Parallel()
	real := labeller{attribute: standIn, system: systemPaths}
	for _, path := range []string{"/", "/usr", "/etc/", "/var/lib", "//usr", "/usr/../usr", "/proc/1/root", "/etc/passwd"} {
		t.Run(path, func(t *testing.T) {
			if err := real.relabel(path, "label"); !errors.Is(err, errSystemPath) && !errors.Is(err, unix.ELOOP) {
				t.Errorf("label %s: %v", path, err)
			}
		})
	}
	l, top := newLabeller(t), t.TempDir()
	makeTree(t, top)
	l.system = []string{filepath.Join(top, "other", "..", "a"), filepath.Join(top, "not there"), filepath.Join(top, "a")}
	if err := l.relabel(top+"/a", "label"); !errors.Is(err, errSystemPath) || labelAt(t, top+"/a/file") != "" {
		t.Errorf("%v, label %q", err, labelAt(t, top+"/a/file"))
	}
}

// While a container swaps directories of its volume for symlinks, no file outside is labelled.
func TestRelabelWhileDirectoriesAreSwapped(t *testing.T) {
	l, top, outside := newLabeller(t), t.TempDir(), t.TempDir()
	makeTree(t, outside)
	makeTree(t, top)
	testutil.Must(t, os.Symlink(outside, top+"/link"))
	var swaps atomic.Int64
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := unix.Renameat2(unix.AT_FDCWD, top+"/a", unix.AT_FDCWD, top+"/link", unix.RENAME_EXCHANGE); err != nil {
				stopped <- err
				return
			}
			swaps.Add(1)
		}
	}()
	labels := []string{"one", "another"}
	for i := 0; i < 500 || swaps.Load() < 500; i++ {
		testutil.Must(t, l.relabel(top, labels[i%2]))
	}
	close(stop)
	testutil.Must(t, <-stopped)
	for _, name := range []string{"", "/a", "/a/file", "/a/b", "/fifo"} {
		if got := labelAt(t, outside+name); got != "" {
			t.Errorf("%s outside the tree has the label %q", name, got)
		}
	}
}
