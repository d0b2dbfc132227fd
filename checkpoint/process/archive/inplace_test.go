package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// TestPackInPlace makes tars of archives whose largest file has different sizes. The result must be
// readable for Import, for GNU tar, and as the original files.
func TestPackInPlace(t *testing.T) {
	t.Parallel()
	insertsRanges(t)
	for _, size := range []int{largeFile, largeFile + 1, largeFile + 4096, 3*largeFile + 511} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			key := newKey(t)
			path := withPages(t, key, size)
			want := contents(t, path)
			file, err := PackInPlace(t.Context(), openDir(t, path))
			testutil.Must(t, err)
			defer file.Close()
			tarred := filepath.Join(t.TempDir(), "archive.tar")
			testutil.Must(t, os.Link(filepath.Join(path, pagesFile), tarred))
			a, to, err := imported(t, tarred, key)
			testutil.Must(t, err)
			if a.Signer != ThisNode {
				t.Errorf("signer %v", a.Signer)
			}
			if got := contents(t, to); !maps.Equal(got, want) {
				t.Error("the imported files differ")
			}
			checkTar(t, tarred)
		})
	}
}

// A copied tar has the same form, so that filesystems with reflinks share the content.
func TestPackAligns(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	for _, size := range []int{largeFile, 2*largeFile + 77} {
		path := withPages(t, key, size)
		tarred := packed(t, path)
		_, to, err := imported(t, tarred, key)
		testutil.Must(t, err)
		if !maps.Equal(contents(t, to), contents(t, path)) {
			t.Errorf("%d: the imported files differ", size)
		}
		checkTar(t, tarred)
	}
}

// checkTar checks that the manifest comes first, that the content of the largest file begins at a
// page, and that GNU tar has nothing to say.
func checkTar(t *testing.T, path string) {
	t.Helper()
	out, err := exec.Command("tar", "-tf", path).CombinedOutput()
	if err != nil || strings.Contains(string(out), "tar:") {
		t.Errorf("tar: %v: %s", err, out)
	}
	file, err := os.Open(path)
	testutil.Must(t, err)
	defer file.Close()
	r := tar.NewReader(file)
	first, err := r.Next()
	testutil.Must(t, err)
	if first.Name != ManifestFile {
		t.Errorf("%s comes first", first.Name)
	}
	for {
		h, err := r.Next()
		testutil.Must(t, err)
		if h.Name == pagesFile {
			break
		}
	}
	at, err := file.Seek(0, io.SeekCurrent)
	if err != nil || at%4096 != 0 {
		t.Errorf("the content begins at %d, %v", at, err)
	}
}

// Small archives and filesystems that cannot insert are not changed.
func TestPackInPlaceCannot(t *testing.T) {
	t.Parallel()
	key := newKey(t)
	small := sealed(t, key, false, "web")
	paths := map[string]string{"small": small}
	if fs := t.TempDir(); magic(t, fs) == unix.TMPFS_MAGIC {
		paths["tmpfs"] = withPages(t, key, largeFile)
	}
	for name, path := range paths {
		want := contents(t, path)
		if _, err := PackInPlace(t.Context(), openDir(t, path)); !errors.Is(err, ErrNotInPlace) {
			t.Errorf("%s: %v", name, err)
		}
		if !maps.Equal(contents(t, path), want) {
			t.Errorf("%s: the archive was changed", name)
		}
		if _, _, err := imported(t, packed(t, path), key); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

const pagesFile = ImagesDir + "/pages-1.img"

// withPages writes an archive of a container with this much memory, in bytes.
func withPages(t *testing.T, key *Key, size int) string {
	t.Helper()
	path := sealed(t, key, false, "web")
	testutil.Must(t, os.Remove(filepath.Join(path, ManifestFile)))
	put(t, filepath.Join(path, pagesFile), string(bytes.Repeat([]byte("0123456789abcdefg"), size/17+1)[:size]))
	testutil.Must(t, Seal(t.Context(), openDir(t, path), manifest(false, "web"), key, nil, false))
	return path
}

// insertsRanges skips a test if the filesystem of temporary files cannot insert into a file.
func insertsRanges(t *testing.T) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	testutil.Must(t, err)
	defer f.Close()
	testutil.Must(t, f.Truncate(1<<20))
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_INSERT_RANGE, 0, 4096); err != nil {
		t.Skipf("NOT TESTED: %s cannot insert into files: %v", f.Name(), err)
	}
}

func magic(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Statfs_t
	testutil.Must(t, unix.Statfs(path, &st))
	return st.Type
}

// contents returns the files below a directory.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	testutil.Must(t, eachFile(openDir(t, dir), func(e entry) error {
		data, err := os.ReadFile(filepath.Join(dir, e.path))
		files[e.path] = string(data)
		return err
	}))
	return files
}
