package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/erofs"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
)

// Files of the EROFS driver.
const (
	dataFile  = "data"  // of a layer: the content of its files
	treeFile  = "tree"  // of a layer: everything else, see package tree
	imageFile = "image" // of a chain of layers: the EROFS image, whose devices are the layers' data
)

const newFile = os.O_RDWR | os.O_CREATE | os.O_EXCL

// ErrTooLarge is wrapped by the errors about layers that the EROFS driver can't take, and another may.
var ErrTooLarge = errors.New("too much for an EROFS image")

// Packer is unpack.Pack, or what does the same elsewhere. It may stop a blob that is an unpack.Stopper.
type Packer func(ctx context.Context, data, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error)

// EROFS is the driver that keeps a layer as one file with the content of all its files, and one with its tree. A chain of
// layers becomes one small EROFS image that shows what overlayfs would show of them, and which refers to their data. No
// file of an image is a file of the host.
//
// What a taken-over berth-unpack leaves of a layer is not shown to the kernel: the tree is in a form that package tree
// believes nothing of, and the image is made of it here.
type EROFS struct {
	pack   Packer
	merger *erofs.Merger
}

// NewEROFS returns the EROFS driver, which has blobs packed by the function, and merges layers with so much memory (erofs.NewMerger).
func NewEROFS(p Packer, memory int64) *EROFS { return &EROFS{p, erofs.NewMerger(memory)} }

// Kind implements Driver.
func (e *EROFS) Kind() rootfs.Kind { return rootfs.EROFS }

// Apply implements Driver.
func (e *EROFS) Apply(ctx context.Context, dir string, blob io.Reader, job unpack.Job) (_ unpack.Result, err error) {
	failpoint.Reach("layer.make-data")
	data, err := os.OpenFile(filepath.Join(dir, dataFile), newFile, 0o600)
	if err != nil {
		return unpack.Result{}, err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	failpoint.Reach("layer.make-tree")
	tree, err := os.OpenFile(filepath.Join(dir, treeFile), newFile, 0o600)
	if err != nil {
		return unpack.Result{}, err
	}
	failpoint.Reach("layer.tree-made")
	defer func() { err = errors.Join(err, tree.Close()) }()
	result, err := e.pack(ctx, data, tree, blob, job)
	if err != nil && (unpack.CodeOf(err) == unpack.MoreMemory || errdefs.Code(coded(err)) == codes.OutOfRange) {
		err = errdefs.New(codes.ResourceExhausted, "%w: %w", ErrTooLarge, err)
	}
	if err != nil {
		return unpack.Result{}, err
	}
	result.Usage, err = usageOf(data, tree)
	return result, err
}

// TreeDigest implements TreeDigester.
func (e *EROFS) TreeDigest(ctx context.Context, dir string, most int64) (digest.Digest, error) {
	f, err := os.Open(filepath.Join(dir, treeFile))
	if err != nil {
		return "", err
	}
	defer f.Close() // read only
	return treeDigest(ctx, f, most)
}

// treeDigest reads a file that may have been made as long as a file can be, with holes, by who has no right to write that much.
func treeDigest(ctx context.Context, f *os.File, most int64) (digest.Digest, error) {
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	if st.Size() > most {
		return "", errdefs.New(codes.ResourceExhausted, "its tree has %d bytes, and may have %d", st.Size(), most)
	}
	d, err := digest.SHA256.FromReader(untilDone{ctx, io.NewSectionReader(f, 0, st.Size())})
	if err != nil {
		return "", fmt.Errorf("digest of %s: %w", f.Name(), err)
	}
	return d, nil
}

// untilDone is a reader that ends with a context.
type untilDone struct {
	ctx  context.Context
	from io.Reader
}

func (r untilDone) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.from.Read(p)
}

// usageOf counts files as diskusage.Nominal does. How many blocks one with holes takes is known when they are allocated.
func usageOf(files ...*os.File) (sum Usage, err error) {
	for _, f := range files {
		bytes, sparse, err := bytesOf(f)
		if err == nil && sparse {
			if err = f.Sync(); err == nil {
				bytes, _, err = bytesOf(f)
			}
		}
		if err != nil {
			return Usage{}, fmt.Errorf("count the blocks of %s: %w", f.Name(), err)
		}
		sum = sum.Add(Usage{Bytes: uint64(bytes), Inodes: 1})
	}
	return sum, nil
}

func bytesOf(f *os.File) (bytes int64, sparse bool, err error) {
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	full, has := (st.Size+tree.BlockSize-1)/tree.BlockSize*tree.BlockSize, st.Blocks*512
	return min(full, has), has < full, err
}

// Empty implements Driver. No chain needs it.
func (e *EROFS) Empty(string) error { return nil }

// Join implements Driver. Merge does more.
func (e *EROFS) Join(*Effort, string, Part, []string) (_ Usage, _ bool, err error) { return }

// Layer implements Driver.
func (e *EROFS) Layer(dir string) rootfs.Layer {
	return rootfs.Layer{Kind: rootfs.EROFS, Path: filepath.Join(dir, imageFile)}
}

// Remove implements Driver: a few files.
func (e *EROFS) Remove(_ context.Context, dir string) error { return os.RemoveAll(dir) }

// Merge writes into dir, which is empty, the image of a chain of layers, whose directories are given lowest first. used are those
// that the image refers to, by index. A hard link to nowhere is InvalidArgument, too much ResourceExhausted.
func (e *EROFS) Merge(effort *Effort, dir string, chain []string) (_ Usage, used []int, err error) {
	failpoint.Reach("layer.write-image")
	image, err := os.OpenFile(filepath.Join(dir, imageFile), newFile, 0o600)
	if err != nil {
		return Usage{}, nil, err
	}
	defer func() { err = errors.Join(err, image.Close()) }()
	var layers []erofs.Files
	for _, layer := range chain {
		layers = append(layers, filesOf(layer))
	}
	used, err = e.merger.Merge(effort.ctx, image, layers, effort.steps)
	failpoint.Reach("layer.image-written")
	if errors.Is(err, tree.ErrTooLarge) {
		return Usage{}, nil, errdefs.New(codes.ResourceExhausted, "%w: to merge its layers takes more than %d bytes of memory: %w", ErrTooLarge, e.merger.Memory(), err)
	}
	if err != nil {
		return Usage{}, nil, blame(err)
	}
	usage, err := usageOf(image)
	return usage, used, err
}

func filesOf(layer string) erofs.Files {
	return erofs.Files{Tree: filepath.Join(layer, treeFile), Data: filepath.Join(layer, dataFile)}
}
