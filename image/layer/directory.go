package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
)

// treeDir is the subdirectory of a layer's directory with its files.
const treeDir = "fs"

// Unpacker does what unpack.Layer does. If the blob is an unpack.Stopper, it may stop the blob.
type Unpacker func(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error)

// Directory is a Joiner. It stores a layer as a directory tree in the form of overlayfs (package
// unpack).
type Directory struct{ unpack Unpacker }

// NewDirectory returns the directory driver.
func NewDirectory(u Unpacker) *Directory { return &Directory{u} }

// Kind implements Driver.
func (d *Directory) Kind() rootfs.Kind { return rootfs.Directory }

// Layer implements Joiner.
func (d *Directory) Layer(dir string) rootfs.Layer {
	return rootfs.Layer{Kind: rootfs.Directory, Path: filepath.Join(dir, treeDir)}
}

// Remove implements Driver.
func (d *Directory) Remove(ctx context.Context, dir string) error {
	root, err := safefs.OpenRoot(filepath.Dir(dir))
	if err != nil {
		return err
	}
	defer root.Close()
	parent, err := safefs.OpenDir(root, "")
	if err != nil {
		return err
	}
	defer parent.Close()
	return parent.RemoveAllUntil(ctx, filepath.Base(dir))
}

// Apply implements Driver.
func (d *Directory) Apply(
	ctx context.Context, dir string, blob io.Reader, job unpack.Job,
) (_ unpack.Result, err error) {
	tree, err := makeTree(dir)
	if err != nil {
		return unpack.Result{}, err
	}
	defer tree.Close()
	record, err := makeRecord(dir)
	if err != nil {
		return unpack.Result{}, err
	}
	defer func() { err = errors.Join(err, record.Close()) }()
	job.Record = record
	result, err := d.unpack(ctx, tree, blob, job)
	if err != nil {
		return unpack.Result{}, err
	}
	used, err := usageOf(record)
	if err != nil {
		return unpack.Result{}, err
	}
	result.Usage = result.Usage.Add(used)
	return result, unpack.MarkOpaque(tree, result.Opaques)
}

// OpenContent implements Driver.
func (d *Directory) OpenContent(dir string) (Content, error) {
	root, err := safefs.OpenRoot(filepath.Join(dir, treeDir))
	if err != nil {
		return nil, err
	}
	return treeContent{root}, nil
}

// treeContent is the content of the files of a directory tree.
type treeContent struct{ *os.File }

// ReadContent implements tarsplit.Content.
func (c treeContent) ReadContent(at tarsplit.Ref, p []byte, offset int64) error {
	if at.Name == "" {
		return fmt.Errorf("%w: it names no file", tarsplit.ErrDamaged)
	}
	parent, name := safefs.Split(safefs.Clean(at.Name))
	dir, err := safefs.OpenDir(c.File, parent)
	if err != nil {
		return err
	}
	defer dir.Close()
	f, err := dir.OpenRegular(name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close() // read only
	_, err = f.ReadAt(p, offset)
	return shortContent(err)
}

// Empty implements Joiner.
func (d *Directory) Empty(dir string) error {
	tree, err := makeTree(dir)
	if err != nil {
		return err
	}
	return tree.Close()
}

// makeTree creates the tree of a layer in dir and opens it.
func makeTree(dir string) (*os.File, error) {
	path := filepath.Join(dir, treeDir)
	if err := os.Mkdir(path, 0o755); err != nil {
		return nil, err
	}
	if err := unix.Chmod(path, 0o755); err != nil { // whatever the umask
		return nil, fmt.Errorf("chmod %s: %w", path, err)
	}
	return safefs.OpenRoot(path)
}

// blame adds the code InvalidArgument to an error if the tar has caused it.
func blame(err error) error {
	if errdefs.Code(err) == codes.Unknown && unpack.IsTarsFault(err) {
		return errdefs.InvalidArgument("%w", err)
	}
	return err
}
