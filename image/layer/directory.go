package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
)

// treeDir is where in a layer's directory its files are.
const treeDir = "fs"

// Directory is the driver that keeps a layer as a directory tree which overlayfs
// mounts as it is.
//
// It unpacks a tar as extracting it onto the layers below would, with these
// rules where tar, the OCI image-spec ("layer.md") and overlayfs leave room:
//
//   - Every path is resolved inside the layer: absolute names, ".." and symlinks
//     of the same layer never lead out of it. A symlink of a layer below is not
//     known here; an entry below it makes a directory in its place, as in
//     containerd's and docker's overlay drivers.
//   - A whiteout hides what the layers below have, never what its own layer has,
//     whatever their order. Where both exist and the layer's is a directory, that is
//     opaque. So is a directory that takes the place of another type of file.
//   - A char device 0/0, which overlayfs takes for a whiteout and cannot show, is
//     one. No driver answers to that number, so nothing else can be meant.
//   - A later entry replaces an earlier one of the same name; two directories become
//     one with the attributes of the later.
//   - Owners must be 0 to 2^32-2.
//   - Of extended attributes, user.*, security.capability and system.posix_acl_* are
//     kept; trusted.* (overlayfs' own are among them), user.overlay.* and the labels
//     of security modules are for the host to set. They are dropped, as are those
//     that the filesystem does not support.
//   - AUFS' own files (.wh..wh.* in the root) are skipped.
//   - The attributes in a hard link's entry are not used: they are its target's.
type Directory struct{}

// NewDirectory returns the directory driver.
func NewDirectory() *Directory { return &Directory{} }

// Kind implements Driver.
func (d *Directory) Kind() rootfs.Kind { return rootfs.Directory }

// Layer implements Driver.
func (d *Directory) Layer(dir string) rootfs.Layer {
	return rootfs.Layer{Kind: rootfs.Directory, Path: filepath.Join(dir, treeDir)}
}

// Remove implements Driver.
func (d *Directory) Remove(dir string) error {
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
	return parent.RemoveAll(filepath.Base(dir))
}

// Apply implements Driver.
func (d *Directory) Apply(ctx context.Context, dir string, in io.Reader, limits Limits) (Contents, error) {
	root, err := makeTree(dir)
	if err != nil {
		return Contents{}, err
	}
	defer root.Close()
	u, err := newUnpacker(root, limits)
	if err != nil {
		return Contents{}, err
	}
	defer u.close()
	if err := u.unpack(ctx, tar.NewReader(in)); err != nil {
		return Contents{}, err
	}
	return u.contents()
}

// makeTree makes the tree of a layer in dir and opens it.
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

// invalid gives an error the code InvalidArgument if it is the tar's fault: an
// errno that says the name or the combination of entries cannot be.
func invalid(err error) error {
	if errdefs.Code(err) != codes.Unknown {
		return err
	}
	for _, errno := range []error{
		unix.ENAMETOOLONG, unix.ELOOP, unix.ENOTDIR, unix.EISDIR, unix.EINVAL, unix.EMLINK, unix.ERANGE, unix.E2BIG, unix.EFBIG, unix.EILSEQ,
		fs.ErrNotExist, fs.ErrExist, tar.ErrHeader, tar.ErrFieldTooLong, io.ErrUnexpectedEOF,
	} {
		if errors.Is(err, errno) {
			return errdefs.InvalidArgument("%w", err)
		}
	}
	return err
}
