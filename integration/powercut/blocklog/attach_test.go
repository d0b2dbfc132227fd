package blocklog

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func attach(t *testing.T, d *Disk) *Attached {
	t.Helper()
	a, err := Attach(d, t.TempDir())
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		t.Skipf("no block devices can be made here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// mounted runs do with the disk's filesystem mounted.
func mounted(t *testing.T, d *Disk, do func(dir string)) {
	t.Helper()
	a, dir := attach(t, d), t.TempDir()
	defer func() {
		if err := a.Detach(); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Mount(a.Path, dir, "ext4", 0, ""); err != nil {
		t.Fatalf("mount: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	}()
	do(dir)
}

// The device reveals programs that do not sync. A program writes a temporary file and renames it.
// After a power failure the file may be empty if its content was not synced before the rename. With
// the sync it never is.
func TestCutLosesUnsyncedFile(t *testing.T) {
	d, err := New(t.TempDir(), 32<<20)
	opened(t, d, err)
	a := attach(t, d)
	run(t, "mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", a.Path)
	if err := a.Detach(); err != nil {
		t.Fatal(err)
	}
	const files = 8
	content := bytes.Repeat([]byte("content "), 1000)
	ends := map[string]int{} // position of the log when the file was complete
	mounted(t, d, func(dir string) {
		for i := range files {
			for _, sync := range []bool{true, false} {
				name := fmt.Sprintf("sync-%v-%d", sync, i)
				replace(t, dir, name, content, sync)
				ends[name] = d.Position()
			}
		}
	})
	random := rand.New(rand.NewPCG(5, 6))
	flushes := d.Flushes()
	lost := map[bool]int{}
	cuts := min(len(flushes), 64) // some of these files reach the disk without a sync
	for _, position := range flushes[len(flushes)-cuts:] {
		c, err := d.Cut(t.TempDir(), position, Loss{Kept: random.Float64(), Atomic: 4096}, random)
		mounted(t, opened(t, c, err), func(dir string) {
			for name, end := range ends {
				got, err := os.ReadFile(filepath.Join(dir, name))
				if end > position || bytes.Equal(got, content) {
					continue
				}
				synced := name[:len("sync-true")] == "sync-true"
				lost[synced]++
				if synced {
					t.Errorf("cut at %d: file %s, complete since %d, has %d bytes (%v)", position, name, end, len(got), err)
				}
			}
		})
	}
	t.Logf("%d power failures: %d times a file without sync was lost", cuts, lost[false])
	if lost[false] == 0 {
		t.Error("no file without sync was ever lost, so the device cannot reveal missing syncs")
	}
}

// replace writes a temporary file and renames it to name. It always syncs the directory, and the
// file only if sync is set.
func replace(t *testing.T, dir, name string, content []byte, sync bool) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "."+name))
	testutil.Must(t, err)
	_, err = f.Write(content)
	testutil.Must(t, err)
	if sync {
		testutil.Must(t, f.Sync())
	}
	testutil.Must(t, f.Close())
	testutil.Must(t, os.Rename(f.Name(), filepath.Join(dir, name)))
	parent, err := os.Open(dir)
	testutil.Must(t, err)
	testutil.Must(t, parent.Sync())
	testutil.Must(t, parent.Close())
}
