package safefs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// nest creates a chain of directories in dir, deeper than the longest path, with a file at each
// level.
func nest(t *testing.T, dir string, levels int) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	testutil.Must(t, err)
	defer func() { unix.Close(fd) }()
	for range levels {
		testutil.Must(t, unix.Mkdirat(fd, "d", 0o700))
		file, err := unix.Openat(fd, "lifted-1", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		testutil.Must(t, err)
		unix.Close(file)
		below, err := unix.Openat(fd, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		testutil.Must(t, err)
		unix.Close(fd)
		fd = below
	}
}

// limitFiles lowers the number of descriptors that the process may have.
func limitFiles(t *testing.T, n uint64) {
	t.Helper()
	var old unix.Rlimit
	testutil.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	testutil.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: old.Max}))
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	})
}

func TestRemoveDeep(t *testing.T) {
	tree := filepath.Join(t.TempDir(), "tree")
	for i := range 3 {
		branch := filepath.Join(tree, string(rune('a'+i)))
		testutil.Must(t, os.MkdirAll(branch, 0o700))
		nest(t, branch, 5000)
	}
	limitFiles(t, 2*openLevels)
	if err := os.RemoveAll(tree); err == nil {
		t.Error("os.RemoveAll also removes this tree: the test has no effect")
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := RemoveAll(ended, tree); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	testutil.Must(t, RemoveAll(t.Context(), tree))
	if _, err := os.Lstat(tree); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the tree still exists: %v", err)
	}
}

func TestRemovePath(t *testing.T) {
	testutil.NeedRoot(t)
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	testutil.Must(t, os.WriteFile(outside, nil, 0o600))
	for name, prepare := range map[string]func(path string) error{
		"nothing":      func(string) error { return nil },
		"no folder":    func(path string) error { return os.RemoveAll(filepath.Dir(path)) },
		"file":         func(path string) error { return os.WriteFile(path, nil, 0) },
		"link":         func(path string) error { return os.Symlink(dir, path) },
		"directory":    func(path string) error { return os.MkdirAll(filepath.Join(path, "a/b"), 0o700) },
		"without mode": func(path string) error { return os.Mkdir(path, 0) },
		"link in it": func(path string) error {
			return errors.Join(os.Mkdir(path, 0o700), os.Symlink(dir, filepath.Join(path, "up")))
		},
		"more than a read": func(path string) error { return many(path, 3000) },
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "it")
			testutil.Must(t, prepare(path))
			testutil.Must(t, RemoveAll(t.Context(), path))
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the path still exists: %v", err)
			}
			if _, err := os.Lstat(outside); err != nil {
				t.Errorf("the target of a link: %v", err)
			}
		})
	}
}

func many(path string, n int) error {
	err := os.Mkdir(path, 0o700)
	for i := range n {
		err = errors.Join(err, os.Mkdir(filepath.Join(path, strconv.Itoa(i)), 0o700))
	}
	return err
}
