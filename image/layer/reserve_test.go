package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestReserve(t *testing.T) {
	const gib = 1 << 30
	disk := func(size, free uint64, inodes, freeInodes uint64) unix.Statfs_t {
		return unix.Statfs_t{Bsize: 4096, Blocks: size / 4096, Bavail: free / 4096, Files: inodes, Ffree: freeInodes}
	}
	kept := Reserve{Percent: 5, Bytes: 4 * gib}
	for _, c := range []struct {
		what    string
		reserve Reserve
		wanted  uint64
		freed   uint64
		fs      unix.Statfs_t
		text    string // of the error; empty: none
	}{
		{"enough", kept, 0, 0, disk(100*gib, 4*gib, 1000, 50), ""},
		{"less than the bytes", kept, 0, 0, disk(100*gib, 4*gib-4096, 1000, 1000), "4294963200 bytes are free"},
		{"less than the percentage, of a small disk", kept, 0, 0, disk(10*gib, gib/2-gib/64, 1000, 1000), "bytes are free"},
		{"enough of a small disk", kept, 0, 0, disk(10*gib, gib/2, 1000, 1000), ""},
		{"few inodes", kept, 0, 0, disk(100*gib, 90*gib, 1000, 49), "49 inodes are free"},
		{"few of very many inodes", kept, 0, 0, disk(100*gib, 90*gib, 1<<30, 1<<16), ""},
		{"too few of very many inodes", kept, 0, 0, disk(100*gib, 90*gib, 1<<30, 1<<16-1), "65536 are kept free"},
		{"more than all", kept, 1 << 63, 0, disk(100*gib, 90*gib, 1000, 1000), "9223372036854775808 or more are needed"},
		{"all that is not kept", kept, 86 * gib, 0, disk(100*gib, 90*gib, 1000, 1000), ""},
		{"more than that", kept, 86*gib + 1, 0, disk(100*gib, 90*gib, 1000, 1000), "are needed"},
		{"as much as that and what is freed", kept, 88 * gib, 2 * gib, disk(100*gib, 90*gib, 1000, 1000), ""},
		{"more than both", kept, 88*gib + 1, 2 * gib, disk(100*gib, 90*gib, 1000, 1000), "are needed"},
		{"the reserve is used, but will be freed", kept, 0, gib, disk(100*gib, 3*gib, 1000, 1000), ""},
		{"a filesystem that does not count inodes", kept, 0, 0, disk(100*gib, 90*gib, 0, 0), ""},
	} {
		err := c.reserve.check(&c.fs, c.wanted, c.freed)
		switch {
		case c.text == "" && err != nil:
			t.Errorf("%s: %v", c.what, err)
		case c.text != "" && (errdefs.Code(err) != codes.ResourceExhausted || !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), c.text)):
			t.Errorf("%s: %v, want %q", c.what, err, c.text)
		}
	}
}

// Creating a layer fails as soon as the layer takes from the disk's reserve, and leaves nothing.
func TestCreateLeavesReserve(t *testing.T) {
	root := t.TempDir()
	s, err := Open(root, NewDirectory(unpack.Layer), Reserve{Percent: 5, Bytes: 1 << 30}, nil, discardLog())
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, s.Close()) })
	var looks, enough atomic.Int64
	s.statfs = func() (unix.Statfs_t, error) {
		fs := unix.Statfs_t{Bsize: 4096, Blocks: 1 << 20, Files: 1 << 20, Ffree: 1 << 20}
		if looks.Add(1) <= enough.Load() {
			fs.Bavail = 1 << 20
		}
		return fs, nil
	}
	var header bytes.Buffer
	testutil.Must(t, tar.NewWriter(&header).WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: 1 << 40, Typeflag: tar.TypeReg}))
	id := Source{Blob: digest.FromString("blob"), DiffID: digest.FromString("tar")}
	for _, c := range []struct {
		enough int64
		blob   io.Reader
	}{
		{0, nil}, // which would panic if it were read
		{1, io.MultiReader(&header, zeros{})},
	} {
		looks.Store(0)
		enough.Store(c.enough)
		err := s.Create(context.Background(), id, c.blob, unpack.Limits{Tar: 1 << 41, Bytes: 1 << 41})
		if errdefs.Code(err) != codes.ResourceExhausted || !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "kept free") {
			t.Errorf("with space for %d checks: %v", c.enough, err)
		}
		left, err := os.ReadDir(filepath.Join(root, "tmp"))
		if err != nil || len(left) > 0 || s.Has(id.Name()) {
			t.Errorf("left: %v, %v", left, err)
		}
	}
	enough.Store(1 << 62)
	create(t, s, makeTar(t, file("f", "content")))
}
