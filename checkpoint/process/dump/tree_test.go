package dump

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// read returns the headers and contents of a tar by name.
func read(t *testing.T, data []byte) (map[string]*tar.Header, map[string][]byte) {
	t.Helper()
	headers, contents := map[string]*tar.Header{}, map[string][]byte{}
	r := tar.NewReader(bytes.NewReader(data))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return headers, contents
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		headers[h.Name], contents[h.Name] = h, content
	}
}

// do fails the test on an error.
func do(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	do(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func TestLayer(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	do(t, os.MkdirAll(in("etc/new"), 0o750))
	do(t, os.WriteFile(in("etc/file"), []byte("content"), 0o640))
	do(t, os.Chown(in("etc/file"), 12, 1<<30))
	when := time.Unix(1_700_000_000, 123456789)
	do(t, os.Chtimes(in("etc/file"), when, when))
	do(t, unix.Setxattr(in("etc/file"), "security.capability", []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	do(t, unix.Setxattr(in("etc/new"), opaque, []byte("y"), 0))
	do(t, unix.Setxattr(in("etc/new"), "trusted.overlay.origin", []byte("x"), 0))
	do(t, os.Link(in("etc/file"), in("second")))
	do(t, os.Symlink("/etc/shadow", in("link")))
	do(t, unix.Mknod(in("gone"), unix.S_IFCHR, 0))
	do(t, unix.Mknod(in("etc/gone"), unix.S_IFCHR, 0))
	do(t, unix.Mknod(in("fifo"), unix.S_IFIFO|0o600, 0))
	do(t, unix.Mknod(in("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	do(t, unix.Mknod(in("socket"), unix.S_IFSOCK|0o600, 0))
	long := strings.Repeat("é", 100)
	do(t, os.WriteFile(in(long), nil, 0o600))
	var out bytes.Buffer
	deleted, err := Layer(context.Background(), open(t, dir), &out)
	do(t, err)
	slices.Sort(deleted)
	if !slices.Equal(deleted, []string{"/etc/gone", "/etc/new/.wh..wh..opq", "/gone"}) {
		t.Errorf("deleted %q", deleted)
	}
	headers, contents := read(t, out.Bytes())
	want := []string{"etc/", "etc/file", "etc/new/", "fifo", "link", "null", "second", long}
	if got := slices.Sorted(maps.Keys(headers)); !slices.Equal(got, want) {
		t.Fatalf("names %q", got)
	}
	// The order decides which of two links has the content.
	file, first := headers["etc/file"], "etc/file"
	if file.Typeflag == tar.TypeLink {
		file, first = headers["second"], "second"
	}
	if string(contents[first]) != "content" || file.Mode != 0o640 || file.Uid != 12 || file.Gid != 1<<30 ||
		!file.ModTime.Equal(when) || len(file.PAXRecords["SCHILY.xattr.security.capability"]) != 20 {
		t.Errorf("file %+v %q", file, contents[first])
	}
	if h := headers["etc/new/"]; h.PAXRecords["SCHILY.xattr."+opaque] != "y" || h.Mode != 0o750 ||
		h.PAXRecords["SCHILY.xattr.trusted.overlay.origin"] != "" {
		t.Errorf("opaque directory %+v", h)
	}
	if h := headers["link"]; h.Typeflag != tar.TypeSymlink || h.Linkname != "/etc/shadow" {
		t.Errorf("link %+v", h)
	}
	if h := headers["null"]; h.Typeflag != tar.TypeChar || h.Devmajor != 1 || h.Devminor != 3 {
		t.Errorf("device %+v", h)
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: trusted attributes and device nodes")
	}
}

func TestLayerRefusesContentOfOtherLayers(t *testing.T) {
	needRoot(t)
	for _, attr := range []string{"trusted.overlay.redirect", "trusted.overlay.metacopy"} {
		t.Run(attr, func(t *testing.T) {
			dir := t.TempDir()
			do(t, os.Mkdir(filepath.Join(dir, "d"), 0o700))
			do(t, unix.Setxattr(filepath.Join(dir, "d"), attr, []byte("x"), 0))
			if _, err := Layer(context.Background(), open(t, dir), io.Discard); errdefs.Code(err) != codes.FailedPrecondition {
				t.Errorf("Layer = %v", err)
			}
		})
	}
}

func TestNamesOfWhiteoutsAreRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	do(t, os.MkdirAll(filepath.Join(dir, "a"), 0o700))
	do(t, os.WriteFile(filepath.Join(dir, "a/.wh.x"), nil, 0o600))
	if err := Directory(context.Background(), open(t, dir), io.Discard); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("Directory = %v", err)
	}
}

func TestDeepTreeIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	do(t, os.MkdirAll(filepath.Join(dir, strings.Repeat("d/", maxLevels+1)), 0o700))
	if err := Directory(context.Background(), open(t, dir), io.Discard); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("Directory = %v", err)
	}
}

func TestSparseFilesStaySparse(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		size int64
		data []int64 // offsets of 10 bytes each
	}{
		{"only a hole", 50 << 20, nil},
		{"start", 50 << 20, []int64{0}},
		{"end", 50<<20 + 10, []int64{50 << 20}},
		{"several", 9 << 30, []int64{1 << 20, 5<<30 + 77, 9<<30 - 10}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			f, err := os.Create(filepath.Join(dir, "file"))
			do(t, err)
			do(t, f.Truncate(tt.size))
			for _, at := range tt.data {
				_, err := f.WriteAt([]byte("0123456789"), at)
				do(t, err)
			}
			do(t, f.Close())
			do(t, os.WriteFile(filepath.Join(dir, "z"), []byte("next"), 0o600))
			var out bytes.Buffer
			do(t, Directory(context.Background(), open(t, dir), &out))
			if out.Len() > 1<<20 {
				t.Errorf("the tar has %d bytes", out.Len())
			}
			checkSparse(t, out.Bytes(), tt.size, tt.data)
		})
	}
}

func checkSparse(t *testing.T, data []byte, size int64, offsets []int64) {
	t.Helper()
	names := 0
	r := tar.NewReader(bytes.NewReader(data))
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		do(t, err)
		names++
		if h.Name != "file" {
			continue
		}
		if h.Size != size {
			t.Errorf("size %d, want %d", h.Size, size)
		}
		at := int64(0)
		for _, offset := range offsets {
			_, err := io.CopyN(io.Discard, r, offset-at)
			do(t, err)
			got := make([]byte, 10)
			_, err = io.ReadFull(r, got)
			do(t, err)
			if string(got) != "0123456789" {
				t.Errorf("%q at %d", got, offset)
			}
			at = offset + 10
		}
	}
	if names != 2 {
		t.Errorf("%d files", names)
	}
}

func TestFragmentedFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "file"))
	do(t, err)
	for i := range int64(500) {
		_, err := f.WriteAt([]byte{byte(i), 1}, i*50_000)
		do(t, err)
	}
	do(t, f.Close())
	want, err := os.ReadFile(filepath.Join(dir, "file"))
	do(t, err)
	var out bytes.Buffer
	do(t, Directory(context.Background(), open(t, dir), &out))
	_, contents := read(t, out.Bytes())
	if sha256.Sum256(contents["file"]) != sha256.Sum256(want) {
		t.Error("the content differs")
	}
}

func TestCopyEndsWithContext(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	do(t, os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Directory(ctx, open(t, dir), io.Discard); !errors.Is(err, context.Canceled) {
		t.Errorf("Directory = %v", err)
	}
}

// full fails like a full filesystem.
type full struct{}

func (full) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "x", Err: unix.ENOSPC}
}

func TestFullFilesystemIsReported(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	do(t, os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o600))
	if err := Directory(context.Background(), open(t, dir), full{}); errdefs.Code(errdefs.Scarce(err)) != codes.ResourceExhausted {
		t.Errorf("Directory = %v", err)
	}
}

func TestPAXRecordLength(t *testing.T) {
	t.Parallel()
	for n := range 1200 {
		record := paxRecord("k", strings.Repeat("x", n))
		length, _, _ := strings.Cut(record, " ")
		if got := len(record); length != itoa(got) {
			t.Fatalf("record of %d bytes says %s", got, length)
		}
	}
}

func itoa(n int) string {
	var b []byte
	for ; n > 0; n /= 10 {
		b = append([]byte{byte('0' + n%10)}, b...)
	}
	return string(b)
}
