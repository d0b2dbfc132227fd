package layer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/record"
	"berth/image/blobindex"
	"berth/image/lazy/fill"
	"berth/image/unpack"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/internal/task"
)

const (
	// lazyDir has the incomplete layers. Versions of berth that cannot fill incomplete layers do
	// not read this directory.
	lazyDir = "lazy"
	// indexFile is the index of an incomplete layer's blob.
	indexFile = "index"
)

// Lazy is what a Store needs for layers that are used before they are complete.
type Lazy struct {
	// Engine fills them. The caller starts it after OpenLazy and closes it after Store.Close.
	Engine *fill.Engine
	// Fill returns the Filler of a layer that an earlier Store has created. toc is nil if this node
	// has made the index.
	Fill func(from Source, x *blobindex.Index, toc *TOC) Filler
	// Done, if not nil, is called once for each layer. err is nil if the layer l is complete, and
	// DataLoss if l cannot be completed because its index is wrong. Such a layer exists until it is
	// removed, and reads of its missing content fail. toc is nil if this node has made the index.
	// Done must not call the Store.
	Done func(from Source, l *fill.Layer, toc *TOC, err error)
}

// Filler fills one layer. See package fill.
type Filler struct {
	Source   fill.Source
	Inflater func() (fill.Inflater, error)
	// Prove is not nil for a layer with a TOC. It calls Store.Prove.
	Prove fill.Prove
}

// OpenLazy is Open for a Merger, with incomplete layers. It adds the layers of an earlier Store to
// the Engine before it returns. So their marks exist before anything is mounted.
func OpenLazy(root string, driver Merger, reserve Reserve, incomplete Lazy, waits *task.Waits,
	log *slog.Logger) (*Store, error) {
	return open(root, driver, reserve, &incomplete, waits, log)
}

// lazyLayers are the incomplete layers of a Store. nil means that there are none.
type lazyLayers struct {
	Lazy
	life *task.Lifetime // of the goroutines that wait for completion

	mu sync.Mutex
	// +checklocks:mu
	layers map[digest.Digest]*lazyLayer
}

// lazyLayer is an incomplete layer.
type lazyLayer struct {
	*fill.Layer
	from      Source
	indexSize int64
	toc       *TOC // nil: this node has made its index
}

func newLazyLayers(with Lazy) *lazyLayers {
	return &lazyLayers{Lazy: with, life: task.NewLifetime(), layers: map[digest.Digest]*lazyLayer{}}
}

func (z *lazyLayers) get(name digest.Digest) *lazyLayer {
	if z == nil {
		return nil
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.layers[name]
}

func (z *lazyLayers) put(name digest.Digest, l *lazyLayer) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.layers[name] = l
}

// tocBytes returns the length of the indexes of layers with a TOC.
func (z *lazyLayers) tocBytes() (sum int64) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, l := range z.layers {
		if l.toc != nil {
			sum += l.indexSize
		}
	}
	return sum
}

// take removes a layer from the set.
func (z *lazyLayers) take(name digest.Digest) *lazyLayer {
	if z == nil {
		return nil
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	l := z.layers[name]
	delete(z.layers, name)
	return l
}

// usageOf returns the disk usage of a layer now.
func (z *lazyLayers) usageOf(info *Info) Usage {
	u := info.Usage
	if l := z.get(info.Name); l != nil && info.Incomplete {
		u.Bytes = u.Bytes - min(u.Bytes, uint64(l.Missing())) + uint64(l.indexSize+l.Kept())
	}
	return u
}

// startAll waits for the completion of all layers that were loaded.
func (z *lazyLayers) startAll(s *Store) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, l := range z.layers {
		z.life.Spawn(func() { s.awaitComplete(l) })
	}
}

// end ends the goroutines. The layers stay in the Engine.
func (z *lazyLayers) end() error {
	if z == nil {
		return nil
	}
	z.life.Close()
	z.life.Cancel()
	return z.life.WaitFor(closeTimeout)
}

// Lazy returns an incomplete layer, or nil if the layer is complete or does not exist.
func (s *Store) Lazy(name digest.Digest) *fill.Layer {
	if l := s.lazy.get(name); l != nil {
		return l.Layer
	}
	return nil
}

// TOC returns the table of contents from which the index of an incomplete layer was made. It is nil
// if this node has made the index from the whole blob.
func (s *Store) TOC(name digest.Digest) *TOC {
	if l := s.lazy.get(name); l != nil {
		return l.toc
	}
	return nil
}

// Incomplete reports whether a layer of a chain is incomplete. A container on it must hold the
// files of fill.Engine.Keep.
func (s *Store) Incomplete(names []digest.Digest) bool {
	for _, name := range names {
		if s.Lazy(name) != nil {
			return true
		}
	}
	return false
}

// Keep returns the files that a container on a chain of layers must hold open (fill.Engine.Keep),
// or nil if all layers are complete.
func (s *Store) Keep(names []digest.Digest) []*os.File {
	if !s.Incomplete(names) {
		return nil
	}
	group, ring := s.lazy.Engine.Keep()
	return []*os.File{group, ring}
}

// CreateLazy creates a layer from the index of its blob alone. When it returns, the layer is
// visible and durable and can be used. The Engine fetches its content in the background and where
// it is read. toc is nil if this node has made the index of the blob. If toc is nil, it is no error
// that the layer exists, complete or not. Otherwise the error is ErrThere, because the table shows
// nothing about the existing layer. The caller then checks whether its pull may use the layer. The
// error is FailedPrecondition if the Store has no Engine, and InvalidArgument if the index belongs
// to another blob or tar. It is DataLoss if the index is damaged, and ResourceExhausted if the
// disk's reserve would be used.
func (s *Store) CreateLazy(ctx context.Context, from Source, x *blobindex.Index, toc *TOC, fill Filler) error {
	if s.lazy == nil {
		return errdefs.FailedPrecondition("layer store %s has no engine for incomplete layers", s.root)
	}
	if x.Blob != from.Blob || x.DiffID != from.DiffID {
		return errdefs.InvalidArgument("index of blob %s with tar %s for layer %s of %s",
			x.Blob, x.DiffID, from.DiffID, from.Blob)
	}
	if x.OfChunks() != (toc != nil) {
		return errdefs.Internal("layer %s: only an index of chunks has a table of contents", from.DiffID)
	}
	if s.Has(from.Name()) {
		return thereUnless(toc == nil)
	}
	encoded, err := x.Encode()
	if err != nil {
		return errdefs.New(codes.DataLoss, "layer %s: %w", from.DiffID, err)
	}
	if err := s.HasRoom(uint64(len(encoded)+len(x.Tree)+len(x.Record)), 0); err != nil {
		return err
	}
	l := &lazyLayer{from: from, indexSize: int64(len(encoded)), toc: toc}
	info := lazyInfo(from, x)
	err = s.build(from.Name().Encoded(), layerKind, func(tmp string) (any, error) {
		return layerRecord{Info: info}, writeLazy(tmp, x, encoded, toc)
	}, func(tmp string) error { return s.admitLazy(ctx, tmp, info, x, l, fill) })
	if errors.Is(err, ErrThere) {
		return thereUnless(toc == nil)
	}
	if err != nil {
		return coded(fmt.Errorf("layer %s: %w", from.DiffID, err))
	}
	return nil
}

func thereUnless(own bool) error {
	if own {
		return nil
	}
	return ErrThere
}

// TOCBytes returns the length of the indexes of all layers with a TOC. They are in memory.
func (s *Store) TOCBytes() int64 {
	if s.lazy == nil {
		return 0
	}
	return s.lazy.tocBytes()
}

// lazyInfo returns the description of the complete layer, with Incomplete set.
func lazyInfo(from Source, x *blobindex.Index) Info {
	return Info{Name: from.Name(), Source: from, TarBytes: x.TarSize, Kind: rootfs.EROFS, Incomplete: true,
		Summary: unpack.Summary{Usage: Usage{Bytes: x.Summary.Bytes, Inodes: x.Summary.Inodes}, Opaque: x.Summary.Opaque,
			Whiteouts: x.Summary.Whiteouts, Sum: x.Summary.Sum},
		Tree: digest.SHA256.FromBytes(x.Tree), Record: int64(len(x.Record))}
}

// writeLazy writes the files of an incomplete layer.
func writeLazy(dir string, x *blobindex.Index, encoded []byte, toc *TOC) error {
	if toc != nil {
		if err := writeTOC(dir, toc); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name    string
		content []byte
	}{{treeFile, x.Tree}, {tarFile, x.Record}, {indexFile, encoded}} {
		failpoint.Reach("layer.write-lazy")
		if err := os.WriteFile(filepath.Join(dir, f.name), f.content, 0o600); err != nil {
			return err
		}
		failpoint.Reach("layer.lazy-written")
	}
	return fill.Prepare(dir, x)
}

// readLazy reads what writeLazy has written, and returns the size of the index's file. The error
// wraps blobindex.ErrDamaged if the files do not belong together.
func readLazy(dir string) (x *blobindex.Index, indexSize int64, err error) {
	var files [3][]byte
	for i, name := range []string{indexFile, treeFile, tarFile} {
		if files[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return nil, 0, err
		}
	}
	if x, err = blobindex.Decode(files[0]); err != nil {
		return nil, 0, err
	}
	return x, int64(len(files[0])), x.SetFiles(files[1], files[2])
}

// admitLazy makes the incomplete layer in tmp visible, unless another call has made the layer. The
// mark is set before.
func (s *Store) admitLazy(ctx context.Context, tmp string, info Info, x *blobindex.Index, l *lazyLayer,
	fill Filler) (err error) {
	owned, err := s.layers.Acquire(ctx, info.Name)
	if err != nil {
		return fmt.Errorf("wait for concurrent creation: %w", err)
	}
	defer owned.Release()
	if owned.Value() != nil {
		return ErrThere
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	if l.Layer, err = s.lazy.Engine.Add(tmp, x, fill.Source, fill.Inflater, fill.Prove); err != nil {
		return err
	}
	undo.Add("stop filling the layer", l.Close)
	if err := s.show(tmp, s.incompleteDir(info.Name)); err != nil {
		return err
	}
	undo.Release()
	s.lazy.put(info.Name, l)
	owned.Set(&info)
	s.lazy.life.Spawn(func() { s.awaitComplete(l) })
	return nil
}

func (s *Store) incompleteDir(name digest.Digest) string {
	return filepath.Join(s.root, lazyDir, name.Encoded())
}

// awaitComplete waits until a layer is complete, and moves it to the complete layers. After a
// failure the next Open moves the layer.
func (s *Store) awaitComplete(l *lazyLayer) {
	ctx := s.lazy.life.Context()
	select {
	case <-ctx.Done():
		return
	case <-l.Done():
	}
	err := l.Err()
	if errors.Is(err, fill.ErrClosed) {
		return // the layer was removed, and its index is not known to be wrong
	}
	if err == nil {
		settle := func() error { return s.settle(ctx, l) }
		if err := task.Guard(s.log, "complete layer", l.from.DiffID.String(), settle); err != nil {
			s.log.Error("layer is complete but could not be recorded; the next start does that",
				"layer", l.from.DiffID, "error", err)
			return
		}
	}
	if s.lazy.Lazy.Done != nil {
		s.lazy.Lazy.Done(l.from, l.Layer, l.toc, err)
	}
}

// settle moves a complete layer to its place.
//
// A symlink takes its old place in the same step, so that existing paths stay valid, for example in
// a merge in progress. The next Open removes the link.
func (s *Store) settle(ctx context.Context, l *lazyLayer) error {
	name := l.from.Name()
	owned, err := s.layers.Acquire(ctx, name)
	if err != nil {
		return fmt.Errorf("wait for the layer: %w", err)
	}
	defer owned.Release()
	info := owned.Value()
	if info == nil || !info.Incomplete {
		return nil // removed meanwhile
	}
	from, to := s.incompleteDir(name), filepath.Join(s.root, layersDir, name.Encoded())
	failpoint.Reach("layer.link-complete")
	if err := os.Symlink(filepath.Join("..", layersDir, name.Encoded()), to); err != nil {
		return err
	}
	failpoint.Reach("layer.complete-linked")
	err = unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	failpoint.Reach("layer.complete-moved")
	if err != nil { // the next Open removes the link
		return fmt.Errorf("exchange %s and %s: %w", from, to, err)
	}
	if err := errors.Join(syncDir(filepath.Dir(to)), syncDir(filepath.Dir(from))); err != nil {
		return err
	}
	done := *info
	done.Incomplete = false
	owned.Set(&done)
	s.lazy.take(name)
	if err := errors.Join(l.Close(), dropLazyFiles(to)); err != nil {
		s.log.Warn("clean up after the completion of a layer", "layer", l.from.DiffID, "error", err)
	}
	return nil
}

// dropLazyFiles removes the files that a complete layer does not need.
func dropLazyFiles(dir string) (err error) {
	for _, name := range []string{indexFile, fill.FilledFile, fill.BlobFile, tocFile} {
		failpoint.Reach("layer.remove-lazy-file")
		if failed := os.Remove(filepath.Join(dir, name)); failed != nil && !errors.Is(failed, fs.ErrNotExist) {
			err = errors.Join(err, failed)
		}
		failpoint.Reach("layer.lazy-file-removed")
	}
	return err
}

// forgetLazy ends the filling of a layer that is being removed. If the layer is complete, it
// removes the link from settle.
func (s *Store) forgetLazy(name digest.Digest) error {
	if l := s.lazy.take(name); l != nil {
		return l.Close()
	}
	if s.lazy == nil || !isLink(s.incompleteDir(name)) {
		return nil
	}
	failpoint.Reach("layer.remove-link")
	err := os.Remove(s.incompleteDir(name))
	failpoint.Reach("layer.link-removed")
	return err
}

// Retire sets an incomplete layer aside that cannot be completed (fill.Layer.Err), so that it can
// be created again. Containers keep the retired layer, and reads of its missing content fail.
// Retire leaves other layers as they are.
func (s *Store) Retire(name digest.Digest) error {
	l := s.lazy.get(name)
	if l == nil || l.Err() == nil {
		return nil
	}
	owned, err := s.layers.Acquire(context.Background(), name)
	if err != nil {
		return fmt.Errorf("retire layer %s: %w", name, err)
	}
	defer owned.Release()
	info := owned.Value()
	if info == nil || s.lazy.get(name) != l {
		return nil
	}
	owned.Set(nil)
	err = s.removeJoins(name)
	if err == nil {
		err = s.setAside(s.incompleteDir(name), l.Err())
	}
	if err != nil {
		owned.Set(info)
		return fmt.Errorf("retire layer %s: %w", name, err)
	}
	s.lazy.take(name)
	return l.Close() // the mark stays, so accesses of the missing content fail
}

// Retired reports whether a layer of a chain was set aside while it was incomplete. Containers may
// still use the retired layer and not the present one.
func (s *Store) Retired(names []digest.Digest) (bool, error) {
	entries, err := os.ReadDir(filepath.Join(s.root, lazyDir, record.SetAsideDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	for _, e := range entries {
		was, _, _ := strings.Cut(e.Name(), ".")
		if slices.ContainsFunc(names, func(name digest.Digest) bool { return name.Encoded() == was }) {
			return true, nil
		}
	}
	return false, nil
}

func isLink(path string) bool {
	st, err := os.Lstat(path)
	return err == nil && st.Mode()&fs.ModeSymlink != 0
}

// dropLinks removes what settle of an earlier Store has left.
func (s *Store) dropLinks() error {
	for _, folder := range []string{lazyDir, layersDir} {
		entries, err := os.ReadDir(filepath.Join(s.root, folder))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if e.Type()&fs.ModeSymlink == 0 {
				continue
			}
			if folder == lazyDir {
				err = dropLazyFiles(filepath.Join(s.root, layersDir, e.Name()))
			}
			failpoint.Reach("layer.drop-link")
			err = errors.Join(err, os.Remove(filepath.Join(s.root, folder, e.Name())))
			failpoint.Reach("layer.link-dropped")
			if err != nil && !errdefs.IsUnwritable(err) {
				return err
			}
		}
	}
	return nil
}

// loadLazy adds the incomplete layers to the Engine. It sets unusable layers aside. Containers may
// run on them, so accesses of their content fail. If there is no Engine, it discards all layers.
func (s *Store) loadLazy() error {
	if s.lazy == nil {
		if _, err := os.Lstat(filepath.Join(s.root, lazyDir)); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return s.discardAll(lazyDir)
	}
	return s.loadDir(lazyDir, func(path string) error {
		err := s.loadIncomplete(path)
		if err == nil || mayBeGood(err) {
			return err
		}
		if refused := s.lazy.Engine.Refuse(path); refused != nil {
			s.log.Error("cannot deny the accesses of an unusable layer", "path", path, "error", refused)
		}
		return err
	})
}

// loadIncomplete adds one layer to the Engine.
func (s *Store) loadIncomplete(path string) error {
	var info Info
	if err := readRecord(path, layerKind, &info); err != nil {
		return err
	}
	if err := info.check(filepath.Base(path)); err != nil {
		return err
	}
	if err := s.checkKind(info.Kind); err != nil {
		return err
	}
	if s.Has(info.Name) {
		return errors.New("the complete layer exists, too")
	}
	x, indexSize, err := readLazy(path)
	if err != nil {
		return err
	}
	if x.Blob != info.Blob || x.DiffID != info.DiffID {
		return fmt.Errorf("its index is one of blob %s with tar %s", x.Blob, x.DiffID)
	}
	toc, err := readTOC(path)
	if err != nil {
		return err
	}
	fill := s.lazy.Fill(info.Source, x, toc)
	l, err := s.lazy.Engine.Add(path, x, fill.Source, fill.Inflater, fill.Prove)
	if err != nil && errdefs.Code(err) != codes.DataLoss {
		return &fs.PathError{Op: "fill", Path: path, Err: err} // not a fault of the layer: see mayBeGood
	}
	if err != nil {
		return err
	}
	info.Incomplete = true
	s.lazy.put(info.Name, &lazyLayer{l, info.Source, indexSize, toc})
	s.layers.Add(info.Name, &info)
	return nil
}
