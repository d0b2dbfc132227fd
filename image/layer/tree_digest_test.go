package layer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// endless is the length of a sparse file that takes hours to read.
const endless = 4 << 40

// The tree file of a compromised packer is read up to the maximum size of a tree only, and only
// until the pull ends.
func TestTreeFileIsReadWithinLimit(t *testing.T) {
	root := testutil.DiskDir(t) // a tmpfs has no such files
	length := int64(endless)
	pack := func(ctx context.Context, data, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
		result, err := unpack.Pack(ctx, data, tree, blob, job)
		return result, errors.Join(err, tree.Truncate(length))
	}
	s, err := Open(root, NewEROFS(pack, 0), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	defer func() { testutil.Must(t, s.Close()) }()
	data := makeTar(t, file("f", "x"))
	err = s.Create(t.Context(), Source{DiffID: digest.FromBytes(data)}, bytes.NewReader(data), unpack.Limits{})
	if errdefs.Code(err) != codes.FailedPrecondition || errors.Is(err, ErrTooLarge) {
		t.Errorf("it is made: %v", err)
	}
	dir := filepath.Join(root, "dir")
	testutil.Must(t, os.Mkdir(dir, 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, treeFile), nil, 0o600))
	testutil.Must(t, os.Truncate(filepath.Join(dir, treeFile), endless))
	ended, end := context.WithCancelCause(t.Context())
	end(io.ErrClosedPipe)
	if _, err := NewEROFS(unpack.Pack, 0).TreeDigest(ended, dir, endless); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("it is read on: %v", err)
	}
}

// packedStore returns a store of the EROFS driver that works without a kernel that can mount
// layers.
func packedStore(t *testing.T, root string) *Store {
	t.Helper()
	s, err := Open(root, NewEROFS(unpack.Pack, 0), Reserve{}, nil, discardLog())
	testutil.Must(t, err)
	return s
}

// The digest of the tree survives restarts. Only packed layers have one.
func TestTreeDigestIsRecorded(t *testing.T) {
	root := t.TempDir()
	s := packedStore(t, root)
	id := create(t, s, makeTar(t, file("f", "x")))
	testutil.Must(t, s.Close())
	s = packedStore(t, root)
	defer func() { testutil.Must(t, s.Close()) }()
	tree, err := os.ReadFile(filepath.Join(s.layerDir(id), treeFile))
	testutil.Must(t, err)
	if info, err := s.Info(id); err != nil || info.Tree != digest.FromBytes(tree) {
		t.Errorf("%+v, %v", info, err)
	}
	directories := openStore(t, t.TempDir())
	if info, err := directories.Info(create(t, directories, makeTar(t, file("f", "x")))); err != nil || info.Tree != "" {
		t.Errorf("%+v, %v", info, err)
	}
}
