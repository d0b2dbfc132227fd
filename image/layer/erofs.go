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
	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
)

// Files of the EROFS driver.
const (
	dataFile  = "data"  // of a layer: the content of its files
	treeFile  = "tree"  // of a layer: names and attributes, see package tree
	imageFile = "image" // of a chain: the EROFS image, with the layers' data files as devices
)

const newFile = os.O_RDWR | os.O_CREATE | os.O_EXCL

// ErrTooLarge is wrapped by errors about layers that are too large for the EROFS driver but not for
// directories.
var ErrTooLarge = errors.New("too large for an EROFS image")

// Packer does what unpack.Pack does. If the blob is an unpack.Stopper, it may stop the blob.
type Packer func(ctx context.Context, data, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error)

// EROFS is a Merger. It stores a layer as two files: the content of all its files, and its tree. It
// merges a chain of layers into one small EROFS image, which shows the same files as overlayfs and
// refers to the layers' data files. Files of an image are not files of the host.
//
// The kernel does not parse the output of berth-unpack, because a blob may have compromised that
// process. Package tree validates the tree file, and the daemon makes the image from it.
type EROFS struct {
	pack   Packer
	merger *erofs.Merger
}

// NewEROFS returns the EROFS driver. memory limits all its merges in bytes, see erofs.NewMerger.
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
	record, err := makeRecord(dir)
	if err != nil {
		return unpack.Result{}, err
	}
	defer func() { err = errors.Join(err, record.Close()) }()
	job.Record = record
	result, err := e.pack(ctx, data, tree, blob, job)
	if err != nil && (unpack.CodeOf(err) == unpack.MoreMemory || errdefs.Code(coded(err)) == codes.OutOfRange) {
		err = errdefs.FailedPrecondition("%w: %w", ErrTooLarge, err)
	}
	if err != nil {
		return unpack.Result{}, err
	}
	result.Usage, err = usageOf(data, tree, record)
	return result, err
}

// OpenContent implements Driver.
func (e *EROFS) OpenContent(dir string) (Content, error) {
	f, err := os.Open(filepath.Join(dir, dataFile))
	if err != nil {
		return nil, err
	}
	return packedContent{f}, nil
}

// packedContent is the content of a layer's files in its data file.
type packedContent struct{ *os.File }

// ReadContent implements tarsplit.Content.
func (c packedContent) ReadContent(at tarsplit.Ref, p []byte, offset int64) error {
	if at.Name != "" {
		return fmt.Errorf("%w: it names a file", tarsplit.ErrDamaged)
	}
	_, err := c.ReadAt(p, at.Offset+offset)
	return shortContent(err)
}

// TreeDigest implements Merger.
func (e *EROFS) TreeDigest(ctx context.Context, dir string, most int64) (digest.Digest, error) {
	f, err := os.Open(filepath.Join(dir, treeFile))
	if err != nil {
		return "", err
	}
	defer f.Close() // read only
	return treeDigest(ctx, f, most)
}

// treeDigest reads the tree file. It checks the size first, because a compromised process could
// have made the file very long with holes.
func treeDigest(ctx context.Context, f *os.File, most int64) (digest.Digest, error) {
	st, err := f.Stat()
	if err != nil {
		return "", err
	}
	if st.Size() > most {
		return "", errdefs.FailedPrecondition("tree file has %d bytes, more than the %d allowed", st.Size(), most)
	}
	d, err := digest.SHA256.FromReader(untilDone{ctx, io.NewSectionReader(f, 0, st.Size())})
	if err != nil {
		return "", fmt.Errorf("compute digest of %s: %w", f.Name(), err)
	}
	return d, nil
}

// untilDone is a reader that fails when a context is done.
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

// usageOf counts files as diskusage.Nominal does. It syncs files with holes, because their blocks
// may not be allocated yet.
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

// Image implements Merger.
func (e *EROFS) Image(dir string, data []string) rootfs.Layer {
	l := rootfs.Layer{Kind: rootfs.EROFS, Path: filepath.Join(dir, imageFile)}
	for _, d := range data {
		l.Data = append(l.Data, filepath.Join(d, dataFile))
	}
	return l
}

// Remove implements Driver.
func (e *EROFS) Remove(_ context.Context, dir string) error { return os.RemoveAll(dir) }

// Merge implements Merger.
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
		return Usage{}, nil, errdefs.FailedPrecondition(
			"%w: merging its layers takes more than %d bytes of memory: %w", ErrTooLarge, e.merger.Memory(), err)
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
