package runtime

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/checkpoint/process/archive"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

func writeJSON(t *testing.T, dir, name string, content any) {
	t.Helper()
	data, err := json.Marshal(content)
	testutil.Must(t, err)
	path := filepath.Join(dir, name)
	testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o700))
	testutil.Must(t, os.WriteFile(path, data, 0o600))
}

// namesIn returns the names of a tar's files.
func namesIn(t *testing.T, from io.Reader) (names []string) {
	t.Helper()
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		testutil.Must(t, err)
		if h.Typeflag != tar.TypeXGlobalHeader {
			names = append(names, h.Name)
		}
	}
}

// layerUnpacker unpacks in this process.
type layerUnpacker struct{}

func (layerUnpacker) Unpack(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
	return unpack.Layer(ctx, tree, blob, job)
}

// tarWith returns a tar with one empty file.
func tarWith(t *testing.T, h *tar.Header) []byte {
	t.Helper()
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	testutil.Must(t, w.WriteHeader(h))
	testutil.Must(t, w.Close())
	return data.Bytes()
}

// polyglot returns a file that is a tar with one harmless file, and also gzip with another tar: the
// name of the file begins like gzip, and the rest of the tar is gzip's extra field.
func polyglot(t *testing.T, hidden []byte) []byte {
	t.Helper()
	data := tarWith(t, &tar.Header{Typeflag: tar.TypeReg, Name: "harmless", Mode: 0o600, Format: tar.FormatUSTAR})
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	w.Extra = []byte{0} // sets the flag
	_, err := w.Write(hidden)
	testutil.Must(t, err)
	testutil.Must(t, w.Close())
	const header, sumAt, sumLen = 12, 148, 8 // of gzip with the length of the extra field; of tar
	copy(data, zipped.Bytes()[:header])
	binary.LittleEndian.PutUint16(data[header-2:], uint16(len(data)-header))
	copy(data[sumAt:], strings.Repeat(" ", sumLen))
	sum := 0
	for _, b := range data[:512] {
		sum += int(b)
	}
	copy(data[sumAt:], fmt.Sprintf("%06o\x00 ", sum))
	return append(data, zipped.Bytes()[header+1:]...)
}

// A tar is unpacked as a plain tar, though it is also a gzip file.
func TestUnpackPlain(t *testing.T) {
	data := polyglot(t, tarWith(t, &tar.Header{Typeflag: tar.TypeReg, Name: "hidden", Mode: 0o4755}))
	for _, deleted := range [][]string{nil, {"/x"}} {
		dir, tree := t.TempDir(), t.TempDir()
		path := filepath.Join(dir, archive.RootfsDiffFile)
		testutil.Must(t, os.WriteFile(path, data, 0o600))
		writeJSON(t, dir, archive.DeletedFilesFile, deleted)
		list, err := whiteouts(dir)
		testutil.Must(t, err)
		to, err := os.Open(tree)
		testutil.Must(t, err)
		defer to.Close()
		result, err := Restores{Unpacker: layerUnpacker{}}.unpack(t.Context(), to, list, path)
		testutil.Must(t, err)
		_, err = os.Lstat(filepath.Join(tree, "hidden"))
		if !errors.Is(err, fs.ErrNotExist) || result.Inodes != uint64(1+len(deleted)) && result.Inodes != uint64(2+len(deleted)) {
			t.Errorf("%d files are unpacked, hidden: %v", result.Inodes, err)
		}
	}
}

// Whole blocks precede the tar that follows the whiteouts, even without any.
func TestWhiteoutsEndWithBlock(t *testing.T) {
	t.Parallel()
	for _, names := range [][]string{nil, {".wh.a"}, {".wh.a", "dir/.wh.b"}} {
		r, err := newWhiteoutReader(names)
		testutil.Must(t, err)
		data, err := io.ReadAll(r)
		testutil.Must(t, err)
		if len(data) == 0 || len(data)%512 != 0 {
			t.Errorf("%q: %d bytes", names, len(data))
		}
	}
}

// The deleted files of a checkpoint become whiteouts. Another tar can follow them.
func TestWhiteouts(t *testing.T) {
	dir := t.TempDir()
	none, err := whiteouts(dir)
	testutil.Must(t, err)
	if names := namesIn(t, none); len(names) > 0 {
		t.Errorf("without a list: %q", names)
	}
	writeJSON(t, dir, archive.DeletedFilesFile, []string{"/etc/passwd", "top", "/../up/../../x/./y", "/var/.wh..wh..opq"})
	list, err := whiteouts(dir)
	testutil.Must(t, err)
	var more bytes.Buffer
	w := tar.NewWriter(&more)
	testutil.Must(t, w.WriteHeader(&tar.Header{Name: "more", Typeflag: tar.TypeReg}))
	testutil.Must(t, w.Close())
	names := namesIn(t, io.MultiReader(list, &more))
	want := []string{"etc/.wh.passwd", ".wh.top", "x/.wh.y", "var/.wh..wh..opq", "more"}
	if !slices.Equal(names, want) {
		t.Errorf("names %q, want %q", names, want)
	}
	for _, bad := range []any{[]string{"/"}, []string{"a/.."}, "text", []int{1}, make([]string, maxDeleted+1)} {
		writeJSON(t, dir, archive.DeletedFilesFile, bad)
		if got, err := whiteouts(dir); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%.100v: %v, %v", bad, got, err)
		}
	}
}

// The error of a checkpoint that was made on another architecture names both.
func TestImportNamesArchitectures(t *testing.T) {
	root := t.TempDir()
	key, err := archive.LoadKey(root)
	testutil.Must(t, err)
	k := Restores{Dirs: state.Dirs{Root: root}, Key: func() (*archive.Key, error) { return key, nil }}
	for _, arch := range []string{"amd64", "arm64", "riscv64"} {
		path := t.TempDir()
		images := filepath.Join(path, archive.ImagesDir)
		writeJSON(t, path, archive.ConfigFile, "")
		writeJSON(t, path, archive.SpecFile, "")
		writeJSON(t, images, "inventory.img", "")
		writeJSON(t, images, archive.DescriptorsFile, "")
		dir, err := os.Open(path)
		testutil.Must(t, err)
		defer dir.Close()
		testutil.Must(t, archive.Seal(t.Context(), dir, &archive.Manifest{Node: archive.Node{Architecture: arch},
			Containers: []archive.Container{{Name: "app", Config: json.RawMessage(`{}`)}}}, key, nil, false))
		_, err = k.Import(t.Context(), path, "pod-"+arch)
		if arch == goruntime.GOARCH {
			testutil.Must(t, err)
			continue
		}
		want := fmt.Sprintf("was made on %s, this node is %s", arch, goruntime.GOARCH)
		if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
