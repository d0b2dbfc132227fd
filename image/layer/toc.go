package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/erofs"
	"berth/image/lazy/fill"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// Outlined is the result of Outline.
type Outlined struct {
	Tree     []byte // the tree file
	DataSize int64  // length of the data file
	unpack.Summary
}

// maxOutlineTree limits the tree of an outline, which is in memory. An image with a larger tree is
// stored as directories.
const maxOutlineTree = 64 << 20

// maxComparedTree limits the memory of a tree during the proof.
const maxComparedTree = erofs.MaxMemory

// Outline makes the tree of a tar that stands for the layer's tar. The tar has all entries of the
// layer's tar, but other contents. It stores nothing.
func (s *Store) Outline(ctx context.Context, from Source, tar io.Reader,
	limits unpack.Limits) (made Outlined, err error) {
	failpoint.Reach("layer.make-outline")
	tmp, err := os.MkdirTemp(filepath.Join(s.root, tmpDir), from.Name().Encoded()+"-")
	failpoint.Reach("layer.outline-made")
	if err != nil {
		return made, err
	}
	made, err = s.outlineIn(ctx, tmp, from, tar, limits)
	if err := errors.Join(err, s.trash.Take(tmp, Usage{})); err != nil {
		return Outlined{}, coded(fmt.Errorf("outline of layer %s: %w", from.DiffID, err))
	}
	return made, nil
}

// outlineIn is Outline with a directory for the files.
func (s *Store) outlineIn(ctx context.Context, tmp string, from Source, tar io.Reader,
	limits unpack.Limits) (made Outlined, err error) {
	job := unpack.Job{Limits: limits, Algorithm: digest.SHA256, NoData: true}
	result, err := s.apply(ctx, tmp, from, tar, job)
	if err != nil {
		return made, err
	}
	st, err := os.Stat(filepath.Join(tmp, dataFile))
	if err != nil {
		return made, err
	}
	made = Outlined{DataSize: st.Size(), Summary: result.Summary}
	f, err := os.Open(filepath.Join(tmp, treeFile))
	if err != nil {
		return made, err
	}
	defer f.Close() // read only
	made.Tree, err = io.ReadAll(io.LimitReader(f, maxOutlineTree+1))
	if err == nil && len(made.Tree) > maxOutlineTree {
		err = errdefs.FailedPrecondition("%w: its tree has more than %d bytes", ErrTooLarge, maxOutlineTree)
	}
	return made, err
}

// Prove checks that the table of contents of an incomplete layer is true. It unpacks the blob,
// which has the right digest, and compares tree, length of the data and summary. It does not write
// the content of files again. It restores the tar from the content that was filled, because the
// table also says where in the blob each content is. Errors: DataLoss that wraps fill.ErrWrongIndex
// if something differs, DataLoss if the blob has no valid layer.
//
// The files that it makes replace the files of the layer, because a table does not describe
// everything in a tar. A crash leaves the old files or the new ones, and the next Store proves them
// again.
func (s *Store) Prove(ctx context.Context, name digest.Digest, blob io.Reader, limits unpack.Limits) error {
	info := s.layers.Get(name)
	if info == nil || s.TOC(name) == nil {
		return errdefs.NotFound("incomplete layer %s", name)
	}
	var made layerRecord
	err := s.build(name.Encoded(), layerKind, func(tmp string) (any, error) {
		var err error
		made, err = s.unpackAgain(ctx, tmp, info, blob, limits)
		return made, err
	}, func(tmp string) error { return s.replaceFiles(ctx, tmp, made.Info) })
	if err != nil {
		return coded(fmt.Errorf("prove the table of contents of layer %s: %w", info.DiffID, err))
	}
	return nil
}

// unpackAgain unpacks the blob into new files of the layer, and returns its record. The files are
// true, because they come from the blob.
func (s *Store) unpackAgain(ctx context.Context, tmp string, info *Info, blob io.Reader,
	limits unpack.Limits) (made layerRecord, err error) {
	job := unpack.Job{Limits: limits, Algorithm: info.DiffID.Algorithm(), NoData: true}
	result, err := s.apply(ctx, tmp, info.Source, blob, job)
	if errdefs.Code(err) == codes.InvalidArgument {
		return made, errdefs.New(codes.DataLoss, "it is no valid layer: %w", err)
	}
	if err != nil {
		return made, err
	}
	if result.Digest != info.DiffID {
		return made, errdefs.New(codes.DataLoss, "its tar has the digest %s", result.Digest)
	}
	described := s.incompleteDir(info.Name)
	if result.Opaque != info.Opaque || result.Whiteouts != info.Whiteouts {
		return made, lies("summary")
	}
	treeNow, err := s.merger.TreeDigest(ctx, tmp, limits.WithDefaults().Memory)
	if err == nil {
		err = sameSize(filepath.Join(tmp, dataFile), filepath.Join(described, dataFile))
	}
	if err == nil && treeNow != info.Tree {
		err = sameTrees(tmp, described)
	}
	if err != nil {
		return made, err
	}
	if err := takeFiles(tmp, described); err != nil {
		return made, err
	}
	if err := s.restores(ctx, tmp, info.DiffID, result.TarBytes); err != nil {
		return made, err
	}
	if result.Usage, err = (Stored{Dir: tmp}).countPacked(); err != nil {
		return made, err
	}
	return s.recordOf(ctx, tmp, info.Source, limits, result, result.TarBytes)
}

func lies(what string) error {
	return errdefs.New(codes.DataLoss, "%w: its layer has another %s", fill.ErrWrongIndex, what)
}

// sameSize returns DataLoss if two data files have different lengths.
func sameSize(own, described string) error {
	a, err := os.Stat(own)
	if err != nil {
		return err
	}
	b, err := os.Stat(described)
	if err == nil && a.Size() != b.Size() {
		return lies("data file")
	}
	return err
}

// sameTrees returns DataLoss if two layers have different trees. A table of contents may have only
// whole seconds in its times.
func sameTrees(own, described string) error {
	var roots [2]*tree.Node
	for i, dir := range []string{own, described} {
		f, err := os.Open(filepath.Join(dir, treeFile))
		if err != nil {
			return err
		}
		defer f.Close() // read only
		st, err := os.Stat(filepath.Join(dir, dataFile))
		if err != nil {
			return err
		}
		most := tree.Limit{Bytes: maxOutlineTree, Memory: maxComparedTree, Blocks: st.Size() / tree.BlockSize}
		roots[i], _, err = tree.Decode(f, 0, most)
		if errors.Is(err, tree.ErrTooLarge) {
			return lies("tree") // the described tree was within the limits
		}
		if err != nil {
			return fmt.Errorf("tree of the layer: %w", err)
		}
	}
	if !sameNodes(roots[0], roots[1], map[*tree.Node]*tree.Node{}) {
		return lies("tree")
	}
	return nil
}

// sameNodes compares trees. pairs has the nodes of both trees that were compared already, because a
// file can have several names.
func sameNodes(own, described *tree.Node, pairs map[*tree.Node]*tree.Node) bool {
	if pairs[own] != nil || pairs[described] != nil {
		return pairs[own] == described && pairs[described] == own
	}
	pairs[own], pairs[described] = described, own
	a, b := *own, *described
	if !sameTime(&a, &b) || len(a.Children) != len(b.Children) || !slices.Equal(a.Xattrs, b.Xattrs) ||
		!bytes.Equal(a.Data.Holes, b.Data.Holes) {
		return false
	}
	for name, child := range a.Children {
		if b.Children[name] == nil || !sameNodes(child, b.Children[name], pairs) {
			return false
		}
	}
	return a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID && a.Major == b.Major && a.Minor == b.Minor &&
		a.Target == b.Target && a.Opaque == b.Opaque && a.Implied == b.Implied && a.IsDir() == b.IsDir() &&
		a.Data.Size == b.Data.Size && a.Data.Block == b.Data.Block && a.Data.ChunkBits == b.Data.ChunkBits
}

// sameTime reports whether a time in a table equals the real time, exactly or rounded to seconds.
func sameTime(own, described *tree.Node) bool {
	a, b := time.Unix(own.Sec, int64(own.Nsec)), time.Unix(described.Sec, int64(described.Nsec))
	return a.Equal(b) || described.Nsec == 0 && a.Sub(b).Abs() < time.Second
}

// takeFiles links the content of an incomplete layer, and package fill's files, into another
// directory. The index there fits the other files.
func takeFiles(own, described string) error {
	x, _, err := readLazy(described)
	if err != nil {
		return err
	}
	for name, to := range map[string]*digest.Digest{treeFile: &x.TreeDigest, tarFile: &x.RecordDigest} {
		content, err := os.ReadFile(filepath.Join(own, name))
		if err != nil {
			return err
		}
		*to = digest.FromBytes(content)
	}
	encoded, err := x.Encode()
	if err != nil {
		return err
	}
	failpoint.Reach("layer.take-files")
	if err := os.WriteFile(filepath.Join(own, indexFile), encoded, 0o600); err != nil {
		return err
	}
	failpoint.Reach("layer.index-taken")
	if err := os.Remove(filepath.Join(own, dataFile)); err != nil {
		return err
	}
	for _, name := range []string{dataFile, fill.FilledFile, fill.BlobFile, tocFile} {
		failpoint.Reach("layer.take-file")
		if err := os.Link(filepath.Join(described, name), filepath.Join(own, name)); err != nil {
			return err
		}
	}
	failpoint.Reach("layer.files-taken")
	return nil
}

// restores returns DataLoss if the tar that is restored from the layer in dir has another digest.
func (s *Store) restores(ctx context.Context, dir string, want digest.Digest, tarBytes int64) error {
	size, err := recordSize(dir)
	if err != nil {
		return err
	}
	record, err := os.Open(filepath.Join(dir, tarFile))
	if err != nil {
		return err
	}
	defer record.Close() // read only
	content, err := s.driver.OpenContent(dir)
	if err != nil {
		return err
	}
	defer content.Close() // read only
	tar, err := tarsplit.Open(record, size, tarBytes, content)
	if err != nil {
		return errdefs.New(codes.DataLoss, "its content cannot be compared: %w", err) // a later attempt would fail, too
	}
	h := want.Algorithm().Hash()
	whole := untilDone{ctx, io.NewSectionReader(tar, 0, tarBytes)}
	if _, err := io.CopyBuffer(h, whole, make([]byte, 1<<20)); err != nil {
		return lostTar(err)
	}
	if digest.NewDigest(want.Algorithm(), h) != want {
		return lies("content of its files")
	}
	return nil
}

// replaceFiles replaces the files of an incomplete layer by the files in tmp.
func (s *Store) replaceFiles(ctx context.Context, tmp string, info Info) error {
	owned, err := s.layers.Acquire(ctx, info.Name)
	if err != nil {
		return fmt.Errorf("wait for the layer: %w", err)
	}
	defer owned.Release()
	if now := owned.Value(); now == nil || !now.Incomplete {
		return errdefs.NotFound("incomplete layer %s", info.Name)
	}
	to := s.incompleteDir(info.Name)
	failpoint.Reach("layer.replace-files")
	err = unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	failpoint.Reach("layer.files-replaced")
	if err != nil {
		return fmt.Errorf("exchange %s and %s: %w", tmp, to, err)
	}
	info.Incomplete = true
	owned.Set(&info)
	if err := errors.Join(syncDir(filepath.Dir(to)), syncDir(filepath.Dir(tmp))); err != nil {
		return err
	}
	return s.trash.Take(tmp, Usage{}) // the old files; all except the tree and the record have another name
}
