package process

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"berth/checkpoint/process/archive"
	"berth/internal/testutil"
)

// The memory is written once where the filesystem can make a tar of its file, and copied elsewhere.
func TestWriteArchive(t *testing.T) {
	for _, top := range []string{t.TempDir(), "/var/tmp", "/dev/shm"} {
		t.Run(filepath.Base(top), func(t *testing.T) {
			path, err := os.MkdirTemp(top, "archive-")
			testutil.Must(t, err)
			defer func() { testutil.Must(t, os.RemoveAll(path)) }()
			pages := filepath.Join(path, "saved", "checkpoint", "pages-1.img")
			testutil.Must(t, os.MkdirAll(filepath.Dir(pages), 0o700))
			testutil.Must(t, os.WriteFile(pages, bytes.Repeat([]byte("page"), 1<<20), 0o644))
			testutil.Must(t, os.WriteFile(filepath.Join(path, "saved", "manifest.json"), []byte("{}"), 0o600))
			from, err := os.Open(filepath.Join(path, "saved"))
			testutil.Must(t, err)
			defer from.Close()
			before, err := os.Stat(pages)
			testutil.Must(t, err)
			place := filepath.Join(path, "archive.tar")
			testutil.Must(t, os.WriteFile(place, []byte("old"), 0o644))
			testutil.Must(t, WriteArchive(t.Context(), from, place))
			after, err := os.Stat(place)
			testutil.Must(t, err)
			if after.Mode() != 0o600 || after.Size() <= before.Size() {
				t.Errorf("%v, %d bytes", after.Mode(), after.Size())
			}
			t.Logf("the file of the memory became the archive: %v", os.SameFile(before, after))
			out, err := exec.Command("tar", "-xOf", place, "checkpoint/pages-1.img").Output()
			if err != nil || !bytes.Equal(out, bytes.Repeat([]byte("page"), 1<<20)) {
				t.Errorf("the memory has %d bytes, %v", len(out), err)
			}
		})
	}
}

// A copy of the whole memory ends with its context.
func TestCopyFile(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "from"), []byte("content"), 0o600))
	from, err := os.Open(filepath.Join(dir, "from"))
	testutil.Must(t, err)
	defer from.Close()
	to, err := os.Create(filepath.Join(dir, "to"))
	testutil.Must(t, err)
	defer to.Close()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := copyFile(ended, to, from); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	testutil.Must(t, copyFile(t.Context(), to, from))
	if data, err := os.ReadFile(to.Name()); string(data) != "content" || err != nil {
		t.Errorf("%q, %v", data, err)
	}
}

// Filesystems without O_TMPFILE get a hidden file first.
func TestNamedArchiveReplaces(t *testing.T) {
	dir, to := t.TempDir(), t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "manifest.json"), []byte("{}"), 0o600))
	from, err := os.Open(dir)
	testutil.Must(t, err)
	defer from.Close()
	parent, err := os.Open(to)
	testutil.Must(t, err)
	defer parent.Close()
	testutil.Must(t, os.WriteFile(filepath.Join(to, "a.tar"), []byte("old"), 0o644))
	fill := func(to *os.File) error { return archive.Pack(t.Context(), from, to) }
	testutil.Must(t, writeNamedFile(parent, "a.tar", fill))
	names, err := os.ReadDir(to)
	info, statErr := os.Stat(filepath.Join(to, "a.tar"))
	if err := errors.Join(err, statErr); err != nil || len(names) != 1 || info.Mode() != 0o600 || info.Size() < 512 {
		t.Errorf("%v, %v, %v", names, info, err)
	}
	testutil.Must(t, os.Mkdir(filepath.Join(to, "dir"), 0o700))
	if err := writeNamedFile(parent, "dir", fill); err == nil {
		t.Error("a directory was replaced")
	}
	if names, err := os.ReadDir(to); err != nil || len(names) != 2 {
		t.Errorf("left %v, %v", names, err)
	}
}
