package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs/mounttest"
)

// defaultACL is one that a directory may hand down: user::rwx user:1000:rwx group::r-x mask::rwx other::---
const defaultACL = "\x02\x00\x00\x00" +
	"\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x07\x00\xe8\x03\x00\x00" + "\x04\x00\x05\x00\xff\xff\xff\xff" +
	"\x10\x00\x07\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff"

// A directory is made of a packed layer only if that is what was packed, in what the checksum of its files leaves out too, and tells all.
func TestCreateFromRefuses(t *testing.T) {
	dated := func(h header, at time.Time) header { h.ModTime, h.Format = at, tar.FormatPAX; return h }
	plain := []header{dir("d", 0o755), file("d/f", "x")}
	handsDown := dir("d", 0o755).xattr("system.posix_acl_default", defaultACL)
	unrecorded := func(t *testing.T, dir string) {
		var r record
		must(t, readRecord(dir, layerKind, &r))
		r.Tree = "" // as it was before there was one
		must(t, writeRecord(dir, layerKind, r))
	}
	longer := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) { must(t, os.Truncate(filepath.Join(dir, name), endless)) }
	}
	// treeOf puts the tree of another layer in the place of a layer's.
	treeOf := func(other ...header) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			s := packedStore(t, t.TempDir())
			id := create(t, s, makeTar(t, other...))
			tree, err := os.ReadFile(filepath.Join(s.layerDir(id), treeFile))
			must(t, err)
			must(t, s.Close())
			must(t, os.WriteFile(filepath.Join(dir, treeFile), tree, 0o600))
		}
	}
	for name, c := range map[string]struct {
		layer  []header
		change func(t *testing.T, dir string)
		code   codes.Code
	}{
		"as it was":                          {plain, nil, codes.OK},
		"without a digest in its record":     {plain, unrecorded, codes.Unknown},
		"with another time":                  {plain, treeOf(plain[0], dated(plain[1], testTime.Add(time.Hour))), codes.DataLoss},
		"with another attribute":             {plain, treeOf(plain[0], file("d/f", "x").xattr("security.capability", string(capability()))), codes.DataLoss},
		"with the attribute gone":            {[]header{file("f", "x").xattr("security.capability", string(capability()))}, treeOf(file("f", "x")), codes.DataLoss},
		"with a directory opaque":            {plain, treeOf(plain[0], file("d/.wh..wh..opq", ""), plain[1]), codes.DataLoss},
		"with a directory implied":           {plain, treeOf(plain[1]), codes.DataLoss},
		"with another link to a layer below": {[]header{hardlink("l", "a")}, treeOf(hardlink("l", "b")), codes.DataLoss},
		"with data that goes on":             {plain, longer(dataFile), codes.ResourceExhausted},
		"with a tree that goes on":           {plain, longer(treeFile), codes.ResourceExhausted},
		"with a default ACL":                 {[]header{handsDown}, nil, codes.OK},
		"that files may have inherited":      {[]header{handsDown, file("d/f", "x")}, nil, codes.OutOfRange},
		"or not":                             {[]header{file("d/f", "x"), handsDown}, nil, codes.OutOfRange},
	} {
		t.Run(name, func(t *testing.T) {
			root := mounttest.DiskDir(t)
			packed := packedStore(t, root)
			id := create(t, packed, makeTar(t, c.layer...))
			if c.change != nil {
				must(t, packed.Close())
				c.change(t, packed.layerDir(id))
				packed = packedStore(t, root)
			}
			defer func() { must(t, packed.Close()) }()
			s := openStore(t, t.TempDir())
			err := s.CreateFrom(t.Context(), packed, id, unpack.Limits{})
			if errdefs.Code(err) != c.code || s.Has(id) != (err == nil) {
				t.Errorf("%v, made: %t; want %v", err, s.Has(id), c.code)
			}
			if unsupported := errors.Is(err, errors.ErrUnsupported); unsupported != (c.code == codes.Unknown) {
				t.Errorf("%v", err)
			}
		})
	}
}

// endless is the length of a file that takes hours to read, and nothing to make.
const endless = 4 << 40

// What a packer that was taken over writes is not read further than a tree can be, nor longer than the pull lasts.
func TestTreeThatGoesOn(t *testing.T) {
	root := mounttest.DiskDir(t) // a tmpfs has no such files
	length := int64(endless)
	pack := func(ctx context.Context, data, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
		result, err := unpack.Pack(ctx, data, tree, blob, job)
		return result, errors.Join(err, tree.Truncate(length))
	}
	s, err := Open(root, NewEROFS(pack, 0), Reserve{}, discardLog())
	must(t, err)
	defer func() { must(t, s.Close()) }()
	data := makeTar(t, file("f", "x"))
	err = s.Create(t.Context(), Source{DiffID: digest.FromBytes(data)}, bytes.NewReader(data), unpack.Limits{})
	if errdefs.Code(err) != codes.ResourceExhausted || errors.Is(err, ErrTooLarge) {
		t.Errorf("it is made: %v", err)
	}
	dir := filepath.Join(root, "dir")
	must(t, os.Mkdir(dir, 0o700))
	must(t, os.WriteFile(filepath.Join(dir, treeFile), nil, 0o600))
	must(t, os.Truncate(filepath.Join(dir, treeFile), endless))
	ended, end := context.WithCancelCause(t.Context())
	end(io.ErrClosedPipe)
	if _, err := NewEROFS(unpack.Pack, 0).TreeDigest(ended, dir, endless); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("it is read on: %v", err)
	}
}

// packedStore is one of the EROFS driver that need not be able to mount anything.
func packedStore(t *testing.T, root string) *Store {
	t.Helper()
	s, err := Open(root, NewEROFS(unpack.Pack, 0), Reserve{}, discardLog())
	must(t, err)
	return s
}

// The digest of the tree is kept over restarts, and is of packed layers alone.
func TestTreeDigestIsRecorded(t *testing.T) {
	root := t.TempDir()
	s := packedStore(t, root)
	id := create(t, s, makeTar(t, file("f", "x")))
	must(t, s.Close())
	s = packedStore(t, root)
	defer func() { must(t, s.Close()) }()
	tree, err := os.ReadFile(filepath.Join(s.layerDir(id), treeFile))
	must(t, err)
	if info, err := s.Info(id); err != nil || info.Tree != digest.FromBytes(tree) {
		t.Errorf("%+v, %v", info, err)
	}
	directories := openStore(t, t.TempDir())
	if info, err := directories.Info(create(t, directories, makeTar(t, file("f", "x")))); err != nil || info.Tree != "" {
		t.Errorf("%+v, %v", info, err)
	}
}
