package unpack

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/internal/testutil"
)

// Nodes compare the files that Pack makes of a tar with those of another node, which may have
// another version of berth. If they differ, the other node counts as a liar and containers are
// killed. So whoever changes these files also raises the number of wholeMagic (image/lazy/index):
// then nodes of different versions do not exchange indexes.
func TestOutputOfPack(t *testing.T) {
	at := time.Unix(1700000000, 123456789)
	header := func(name string, kind byte, change func(*tar.Header)) tar.Header {
		h := tar.Header{Name: name, Typeflag: kind, Mode: 0o755, Uid: 1000, Gid: 70000, ModTime: at, Format: tar.FormatPAX}
		if change != nil {
			change(&h)
		}
		return h
	}
	blob := makeTar(t, strings.Repeat("content", 2000),
		header("dir/", tar.TypeDir, nil),
		header("dir/file", tar.TypeReg, func(h *tar.Header) { h.Size = 10000 }),
		header("dir/small", tar.TypeReg, func(h *tar.Header) { h.Size, h.Mode = 3, 0o4755 }),
		header("dir/empty", tar.TypeReg, nil),
		header("dir/hard", tar.TypeLink, func(h *tar.Header) { h.Linkname = "dir/file" }),
		header("dir/soft", tar.TypeSymlink, func(h *tar.Header) { h.Linkname = "../elsewhere" }),
		header("dir/attributes", tar.TypeReg, func(h *tar.Header) {
			h.Size, h.PAXRecords = 1, map[string]string{"SCHILY.xattr.user.b": "two", "SCHILY.xattr.user.a": "one"}
		}),
		header("dir/pipe", tar.TypeFifo, nil),
		header("dir/.wh.gone", tar.TypeReg, nil),
		header("opaque/", tar.TypeDir, nil),
		header("opaque/.wh..wh..opq", tar.TypeReg, nil),
		header("not/listed/"+strings.Repeat("x", 200), tar.TypeReg, func(h *tar.Header) { h.Size = 4096 }),
		header("dir/file", tar.TypeReg, func(h *tar.Header) { h.Size = 5000 }), // replaces the first
	)
	dir := t.TempDir()
	files := map[string]*os.File{}
	for _, name := range []string{"data", "tree"} {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
		testutil.Must(t, err)
		defer f.Close()
		files[name] = f
	}
	_, err := Pack(t.Context(), files["data"], files["tree"], bytes.NewReader(blob), Job{Algorithm: digest.SHA256})
	testutil.Must(t, err)
	for name, want := range map[string]string{
		"data": "eb8a824a41a9bd57",
		"tree": "af7a7cdb75eed3cb",
	} {
		content, err := os.ReadFile(filepath.Join(dir, name))
		testutil.Must(t, err)
		if got := digest.FromBytes(content).Encoded()[:16]; got != want {
			t.Errorf("the %s file has %d bytes and the digest %s, not %s", name, len(content), got, want)
		}
	}
}
