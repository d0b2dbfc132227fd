package copytree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
	"berth/internal/testutil"
)

// tree creates a root from lines: "dir/" is a directory, "link -> target" a symlink, other names
// are files that contain their name.
func tree(t *testing.T, lines ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, line := range lines {
		name, target, isLink := strings.Cut(line, " -> ")
		path := filepath.Join(root, name)
		testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		switch {
		case isLink:
			testutil.Must(t, os.Symlink(target, path))
		case strings.HasSuffix(name, "/"):
			testutil.Must(t, os.MkdirAll(path, 0o755))
		default:
			testutil.Must(t, os.WriteFile(path, []byte(name), 0o644))
		}
	}
	return root
}

// list returns a root's content as lines of tree, with the content of files.
func list(t *testing.T, root string) (lines []string) {
	t.Helper()
	testutil.Must(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		switch {
		case err != nil || name == ".":
			return err
		case entry.Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			lines = append(lines, name+" -> "+target)
			return err
		case entry.IsDir():
			lines = append(lines, name+"/")
			return nil
		}
		content, err := os.ReadFile(path)
		lines = append(lines, name+"="+string(content))
		return err
	}))
	return lines
}

// copyIn copies between two roots and returns the warnings.
func copyIn(t *testing.T, fromRoot, from, toRoot, to string, o Options) (warnings []string, err error) {
	t.Helper()
	open := func(path string) *os.File {
		f, err := safefs.OpenRoot(path)
		testutil.Must(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	if o.Owner == nil {
		o.Owner = func(uint32, uint32) (uint32, uint32) { return uint32(os.Geteuid()), uint32(os.Getegid()) }
	}
	o.Warn = func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	err = Copy(t.Context(), Place{open(fromRoot), from}, Place{open(toRoot), to}, o)
	return warnings, err
}

func TestCopyNamesResultAsDocker(t *testing.T) {
	t.Parallel()
	source := []string{"d/a", "d/sub/b", "d/l -> a", "file", "link -> file", "dirlink -> d"}
	for _, tt := range []struct {
		from, to string
		have     []string
		want     []string
	}{
		{"/file", "/new", nil, []string{"new=file"}},
		{"/file", "/", nil, []string{"file=file"}},
		{"/file", "/x", []string{"x/"}, []string{"x/", "x/file=file"}},
		{"/file", "/x", []string{"x"}, []string{"x=file"}},
		{"/file", "/l", []string{"l -> /gone/x"}, []string{"l=file"}},
		{"/d", "/new", nil, []string{"new/", "new/a=d/a", "new/l -> a", "new/sub/", "new/sub/b=d/sub/b"}},
		{"/d", "/x", []string{"x/"}, []string{"x/", "x/d/", "x/d/a=d/a", "x/d/l -> a", "x/d/sub/", "x/d/sub/b=d/sub/b"}},
		{"/d/sub/.", "/x", []string{"x/b", "x/c"}, []string{"x/", "x/b=d/sub/b", "x/c=x/c"}},
		{"/link", "/", nil, []string{"link -> file"}},
		{"/dirlink/sub", "/", nil, []string{"sub/", "sub/b=d/sub/b"}},
		{"/dirlink/", "/new", nil, []string{"new/", "new/a=d/a", "new/l -> a", "new/sub/", "new/sub/b=d/sub/b"}},
		{"/../../../file", "/../../new", nil, []string{"new=file"}},
	} {
		t.Run(tt.from+" to "+tt.to, func(t *testing.T) {
			t.Parallel()
			target := tree(t, tt.have...)
			if _, err := copyIn(t, tree(t, source...), tt.from, target, tt.to, Options{}); err != nil {
				t.Fatal(err)
			}
			if got := list(t, target); !slices.Equal(got, tt.want) {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

func TestCopyFollowsSourceLinkInsideRoot(t *testing.T) {
	t.Parallel()
	source := tree(t, "etc/passwd", "abs -> /etc/passwd", "up -> ../../../etc/passwd", "loop -> loop")
	for _, name := range []string{"abs", "up"} {
		target := t.TempDir()
		if _, err := copyIn(t, source, name, target, "/", Options{Follow: true}); err != nil {
			t.Fatal(err)
		}
		if got := list(t, target); !slices.Equal(got, []string{name + "=etc/passwd"}) {
			t.Errorf("%s: %q", name, got)
		}
	}
	if _, err := copyIn(t, source, "loop", t.TempDir(), "/", Options{Follow: true}); !errors.Is(err, unix.ELOOP) {
		t.Errorf("loop: %v", err)
	}
}

func TestCopyRefusesImpossible(t *testing.T) {
	t.Parallel()
	source := tree(t, "d/a", "file", "link -> file")
	for _, tt := range []struct {
		from, to string
		want     error
	}{
		{"/none", "/", fs.ErrNotExist},
		{"/file", "/no/such/dir", fs.ErrNotExist},
		{"/file", "/new/", fs.ErrNotExist},
		{"/d", "/file", unix.ENOTDIR},
		{"/file/.", "/", unix.ENOTDIR},
	} {
		if _, err := copyIn(t, source, tt.from, tree(t, "file"), tt.to, Options{}); !errors.Is(err, tt.want) {
			t.Errorf("%s to %s: %v, want %v", tt.from, tt.to, err, tt.want)
		}
	}
}

// A volume of the host that is mounted in a container has two paths.
func TestCopyKeepsSourceThatIsTheDestination(t *testing.T) {
	t.Parallel()
	const same, inside = "are the same file", "cannot copy a directory into itself"
	for _, tt := range []struct{ from, to, want string }{
		{"/d/a", "/d", same},
		{"/d/a", "/d/a", same},
		{"/d/a", "/d/hard", same},
		{"/d/sub", "/d", inside},
		{"/d/.", "/d", inside},
		{"/.", "/", inside},
		{"/d", "/d", inside},
		{"/d", "/d/new", inside},
		{"/d", "/d/sub", inside},
		{"/d", "/d/sub/new", inside},
		{"/.", "/d/sub", inside},
	} {
		t.Run(tt.from+" to "+tt.to, func(t *testing.T) {
			t.Parallel()
			root := tree(t, "d/a", "d/sub/b")
			testutil.Must(t, os.Link(filepath.Join(root, "d/a"), filepath.Join(root, "d/hard")))
			_, err := copyIn(t, root, tt.from, root, tt.to, Options{})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			for _, line := range list(t, root) {
				if strings.Count(line, "/") > 5 { // only the destination itself may have got a copy
					t.Errorf("the copy contains itself: %s", line)
				}
				if name, content, _ := strings.Cut(line, "="); filepath.Base(name) == "a" && content != "d/a" {
					t.Errorf("changed a file: %s", line)
				}
			}
		})
	}
}

// A running program cannot be opened for writing, so a copy replaces it.
func TestCopyKeepsRunningProgramThatIsTheDestination(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	testutil.Must(t, err)
	before, err := os.Stat(self)
	testutil.Must(t, err)
	dir := filepath.Dir(self)
	_, err = copyIn(t, dir, filepath.Base(self), dir, filepath.Base(self), Options{})
	if err == nil || !strings.Contains(err.Error(), "are the same file") {
		t.Errorf("error %v", err)
	}
	if after, err := os.Stat(self); err != nil || !os.SameFile(before, after) {
		t.Errorf("the program was replaced: %v", err)
	}
}

func TestCopySkipsSpecialFilesAndSetID(t *testing.T) {
	t.Parallel()
	source := tree(t, "d/tool")
	testutil.Must(t, unix.Mkfifo(filepath.Join(source, "d/fifo"), 0o666))
	testutil.Must(t, os.Chmod(filepath.Join(source, "d/tool"), 0o755|fs.ModeSetuid))
	target := t.TempDir()
	warnings, err := copyIn(t, source, "/d", target, "/", Options{})
	if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], "/d/fifo") {
		t.Errorf("%q, %v", warnings, err)
	}
	if info, err := os.Stat(filepath.Join(target, "d/tool")); err != nil || info.Mode() != 0o755 {
		t.Errorf("%v, %v", info, err)
	}
	if _, err := copyIn(t, source, "/d/tool", target, "/kept", Options{SetID: true}); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(target, "kept")); err != nil || info.Mode() != 0o755|fs.ModeSetuid {
		t.Errorf("%v, %v", info, err)
	}
}

// A container that replaces directories by symlinks during the copy cannot make Copy leave the
// root, in either direction (CVE-2018-15664).
func TestCopyStaysInsideChangingTree(t *testing.T) {
	t.Parallel()
	outside := tree(t, "secret")
	hostile := tree(t, "d/x/file", "d/y")
	var racing sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	racing.Go(func() {
		swap, moved := filepath.Join(hostile, "d/x"), filepath.Join(hostile, "moved")
		for ctx.Err() == nil {
			_ = os.Rename(swap, moved)
			_ = os.Symlink(outside, swap)
			_ = os.Remove(swap)
			_ = os.Rename(moved, swap)
		}
	})
	good := tree(t, "x/secret", "x/file")
	for range 300 {
		target := t.TempDir()
		_, _ = copyIn(t, hostile, "/d", target, "/", Options{}) // may fail, because names come and go
		for _, line := range list(t, target) {
			if strings.HasSuffix(line, "=secret") {
				t.Fatalf("copied a file outside of the root: %q", line)
			}
		}
		_, _ = copyIn(t, good, "/x", hostile, "/d", Options{})
	}
	stop()
	racing.Wait()
	if got := list(t, outside); !slices.Equal(got, []string{"secret=secret"}) {
		t.Errorf("outside of the root is %q", got)
	}
}
