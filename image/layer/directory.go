package layer

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
)

// treeDir is the subdirectory of a layer's directory with its files.
const treeDir = "fs"

// Unpacker has the contract of unpack.Layer. It may stop a blob that is an unpack.Stopper.
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
func (d *Directory) Apply(ctx context.Context, dir string, blob io.Reader, job unpack.Job) (unpack.Result, error) {
	tree, err := makeTree(dir)
	if err != nil {
		return unpack.Result{}, err
	}
	defer tree.Close()
	result, err := d.unpack(ctx, tree, blob, job)
	if err != nil {
		return unpack.Result{}, err
	}
	return result, unpack.MarkOpaque(tree, result.Opaques)
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

// blame adds the code InvalidArgument to an error that the tar caused.
func blame(err error) error {
	if errdefs.Code(err) == codes.Unknown && unpack.IsTarsFault(err) {
		return errdefs.InvalidArgument("%w", err)
	}
	return err
}
