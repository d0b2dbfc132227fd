package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/internal/trash"
)

// Store keeps layers below one directory. Its methods may be called concurrently.
type Store struct {
	root    string
	driver  Driver
	joiner  Joiner // the driver if it is a Joiner; otherwise nil
	merger  Merger
	log     *slog.Logger
	layers  *table[Info]
	joins   *table[join]
	trash   *trash.Trash
	deleter *task.Lifetime // of the goroutine that empties the trash
	home    *os.File       // root, for syncs; opened before any write that a sync flushes
	syncs   *syncer
	reserve Reserve
	statfs  func() (unix.Statfs_t, error) // of root
	aside   atomic.Bool                   // whether the set-aside folders may have entries
	effort  int64                         // limits the work for the joins of one image; allEffort, except in tests
	making  atomic.Int64                  // tar bytes read so far for layers under construction
	lazy    *lazyLayers                   // nil: no incomplete layers
}

// Open opens the store in root, creates it if needed and starts its deleter. No other Store may use
// root. Open deletes unfinished layers of an earlier Store in the background. It moves layers with
// a damaged record, and layers of another driver, to the set-aside folder and logs them. Their
// images must be pulled again. It fails if a record is unreadable for another reason, or if a newer
// berth wrote it. Layers leave the reserve free on the filesystem. waits records deletions; nil: no
// recording.
func Open(root string, driver Driver, reserve Reserve, waits *task.Waits, log *slog.Logger) (*Store, error) {
	return open(root, driver, reserve, nil, waits, log)
}

// open implements Open and OpenLazy.
func open(root string, driver Driver, reserve Reserve, incomplete *Lazy, waits *task.Waits,
	log *slog.Logger) (_ *Store, err error) {
	s := &Store{root: root, driver: driver, log: log, layers: newTable[Info](), joins: newTable[join](),
		reserve: reserve, statfs: reserve.statfsOf(root), effort: allEffort}
	switch d := driver.(type) {
	case Joiner:
		s.joiner = d
	case Merger:
		s.merger = d
	default:
		return nil, fmt.Errorf("open layer store: %T is neither a Joiner nor a Merger", driver)
	}
	dirs := []string{layersDir, joinsDir, tmpDir, trashDir}
	if incomplete != nil {
		s.lazy = newLazyLayers(*incomplete)
		dirs = append(dirs, lazyDir)
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			return nil, fmt.Errorf("open layer store: %w", err)
		}
	}
	if err := spreadOverDisk(filepath.Join(root, tmpDir)); err != nil {
		log.Debug("cannot spread layers over block groups", "error", err)
	}
	home, err := os.Open(root)
	if err != nil {
		return nil, fmt.Errorf("open layer store: %w", err)
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("close "+root, home.Close)
	s.home, s.syncs = home, newSyncer(home)
	s.trash = trash.New(filepath.Join(root, trashDir), driver.Remove, waits, log)
	if err := s.load(); err != nil {
		return nil, fmt.Errorf("open layer store %s: %w", root, err)
	}
	if err := s.makeEmpty(); err != nil {
		return nil, fmt.Errorf("open layer store %s: create empty layer: %w", root, err)
	}
	if s.lazy != nil {
		s.lazy.startAll(s)
	}
	s.deleter = task.NewLifetime()
	s.deleter.Spawn(func() { s.trash.Run(s.deleter.Context()) })
	undo.Release()
	return s, nil
}

// makeEmpty creates the empty layer, see stack.
func (s *Store) makeEmpty() error {
	if s.joiner == nil {
		return nil
	}
	if _, err := os.Lstat(s.emptyDir()); err == nil {
		return nil
	}
	return s.publish(s.emptyDir(), layerKind, func(dir string) (any, error) {
		return struct{}{}, s.joiner.Empty(dir)
	})
}

func (s *Store) emptyDir() string { return filepath.Join(s.root, "empty-"+string(s.driver.Kind())) }

// closeTimeout limits the wait for the deleter, which may be blocked by the disk.
const closeTimeout = 5 * time.Second

// Close stops the deleter; the next Open continues the deletion. No other method may run during or
// after Close.
func (s *Store) Close() error {
	s.deleter.Cancel()
	failed := s.lazy.end()
	failed = errors.Join(failed, s.deleter.WaitFor(closeTimeout))
	if failed != nil {
		failed = fmt.Errorf("stop the deletion and completion of layers in %s: %w", s.root, failed)
	}
	for _, j := range s.joins.All() {
		failed = errors.Join(failed, j.unmount())
	}
	return errors.Join(failed, s.home.Close())
}

// Kind returns the form of the layers.
func (s *Store) Kind() rootfs.Kind { return s.driver.Kind() }

// Has reports whether a layer exists.
func (s *Store) Has(name digest.Digest) bool { return s.layers.Get(name) != nil }

// Info returns the description of a layer, or NotFound.
func (s *Store) Info(name digest.Digest) (Info, error) {
	info := s.layers.Get(name)
	if info == nil {
		return Info{}, errdefs.NotFound("layer %s does not exist", name)
	}
	return *info, nil
}

// List returns the names of all layers, sorted.
func (s *Store) List() []digest.Digest {
	var names []digest.Digest
	for _, info := range s.layers.All() {
		names = append(names, info.Name)
	}
	slices.Sort(names)
	return names
}

// Usage returns the disk usage of all layers. It includes layers under deletion and, for layers
// under construction, the tar bytes received. It does not read the disk.
func (s *Store) Usage() Usage {
	sum := s.trash.Usage()
	sum.Bytes += uint64(s.making.Load())
	for _, info := range s.layers.All() {
		sum = sum.Add(s.lazy.usageOf(info))
	}
	for _, j := range s.joins.All() {
		sum = sum.Add(j.Usage)
	}
	return sum
}

// Create creates the layer of a source from its blob: a tar, plain or compressed with gzip or zstd.
// The caller's reader verifies the blob's digest. Create reads blob to its end, because bytes after
// the archive count for the diffID. If the layer exists, it does not read blob. When it returns
// nil, the layer is visible and durable. After an error nothing of the layer remains.
//
// Another goroutine reads blob and ends before Create returns. A Read must return when ctx is done,
// and should return when the layer has failed (unpack.Stopper). Concurrent calls for a layer do not
// wait for each other, because one blob may come from a host that never ends. The first call to
// finish creates the layer.
func (s *Store) Create(ctx context.Context, from Source, blob io.Reader, limits unpack.Limits) error {
	return s.CreateWithPoints(ctx, from, blob, limits, Points{})
}

// Points says where Create writes the points of a blob: the places where decompression can begin.
// See the fields of unpack.Job.
type Points struct {
	File *os.File // nil: nowhere
	Span int64
}

// CreateWithPoints is Create, and also writes the points of the blob. Their file stays empty if the
// layer can have no index, if another call has made the layer, or if the driver is no Merger.
func (s *Store) CreateWithPoints(ctx context.Context, from Source, blob io.Reader, limits unpack.Limits,
	points Points) error {
	if err := from.Validate(); err != nil {
		return errdefs.InvalidArgument("layer: %w", err)
	}
	if s.Has(from.Name()) {
		return nil
	}
	job := unpack.Job{Limits: limits, Points: points.File, Span: points.Span}
	return s.create(ctx, from, blob, job, func(made unpack.Result) (tarBytes int64, err error) {
		if made.Digest != from.DiffID {
			return 0, errdefs.New(codes.DataLoss, "tar of %d bytes has the digest %s", made.TarBytes, made.Digest)
		}
		return made.TarBytes, nil
	})
}

// CreateFile is Create for a layer with one file, whose content is the blob as it is. from.DiffID
// stands for the path. The layer's record has the digest of the tar that CreateFile makes of the
// blob.
func (s *Store) CreateFile(ctx context.Context, from Source, file File, limits unpack.Limits) error {
	if err := from.Validate(); err != nil {
		return errdefs.InvalidArgument("layer: %w", err)
	}
	if s.Has(from.Name()) {
		return nil
	}
	blob, size, err := file.tar()
	if err != nil {
		return fmt.Errorf("layer of the file %q: %w", file.Path, err)
	}
	return s.create(ctx, from, blob, unpack.Job{Limits: limits}, func(made unpack.Result) (tarBytes int64, err error) {
		if made.TarBytes != size {
			return 0, errdefs.New(codes.DataLoss, "tar has %d bytes, not %d", made.TarBytes, size)
		}
		return size, nil
	})
}

// create creates a layer. check validates the result and returns the length of the tar.
func (s *Store) create(ctx context.Context, from Source, blob io.Reader, job unpack.Job,
	check func(unpack.Result) (tarBytes int64, err error)) error {
	var made layerRecord
	count := &tally{sum: &s.making}
	defer count.end()
	job.Algorithm, job.Progress = from.DiffID.Algorithm(), count.more
	err := s.build(from.Name().Encoded(), layerKind, func(tmp string) (any, error) {
		result, err := s.apply(ctx, tmp, from, blob, job)
		if err != nil {
			return nil, err
		}
		tarBytes, err := check(result)
		if err != nil {
			return nil, err
		}
		made, err = s.recordOf(ctx, tmp, from, job.Limits, result, tarBytes)
		return made, err
	}, func(tmp string) error { return s.admit(ctx, tmp, made.Info) })
	if errors.Is(err, ErrThere) {
		return nil
	}
	if err != nil {
		return coded(fmt.Errorf("layer %s: %w", from.DiffID, err))
	}
	return nil
}

// tally adds to a sum until end, which subtracts all of it.
type tally struct {
	sum *atomic.Int64
	n   atomic.Int64
}

func (t *tally) more(n int) {
	t.n.Add(int64(n))
	t.sum.Add(int64(n))
}

func (t *tally) end() { t.sum.Add(-t.n.Load()) }

// ErrThere is wrapped by the error of CreateLazy with a TOC if the layer exists.
var ErrThere = errors.New("layer exists")

// admit makes the layer in tmp visible unless another call has made the same layer.
func (s *Store) admit(ctx context.Context, tmp string, info Info) error {
	layer, err := s.layers.Acquire(ctx, info.Name)
	if err != nil {
		return fmt.Errorf("wait for concurrent creation: %w", err)
	}
	defer layer.Release()
	if layer.Value() != nil {
		return ErrThere
	}
	if err := s.show(tmp, s.layerDir(info.Name)); err != nil {
		return err
	}
	layer.Set(&info)
	return nil
}

// apply calls the driver's Apply while it guards the reserve.
func (s *Store) apply(
	ctx context.Context, dir string, from Source, blob io.Reader, job unpack.Job,
) (unpack.Result, error) {
	guarded, stop, err := s.guard(ctx)
	if err != nil {
		return unpack.Result{}, err
	}
	defer stop()
	made, err := s.driver.Apply(guarded, dir, blob, job)
	if err == nil && made.Unsupported > 0 {
		s.log.Warn("extended attributes of a layer dropped: the filesystem does not support them", "layer", from.DiffID,
			"count", made.Unsupported)
	}
	return made, err
}

// recordOf returns the record of the layer in dir.
func (s *Store) recordOf(ctx context.Context, dir string, from Source, limits unpack.Limits, made unpack.Result,
	tarBytes int64) (_ layerRecord, err error) {
	info := Info{Name: from.Name(), Source: from, TarBytes: tarBytes, Kind: s.driver.Kind(), Summary: made.Summary}
	info.PendingLinks, info.ImpliedDirs = len(made.Links), len(made.Implied)
	if info.Record, err = recordSize(dir); err != nil {
		return layerRecord{}, err
	}
	if made.Digest != from.DiffID {
		info.TarDigest = made.Digest
	}
	if s.merger != nil {
		info.Tree, err = s.merger.TreeDigest(ctx, dir, limits.WithDefaults().Memory)
	}
	return layerRecord{info, made.Links, made.Implied}, err
}

// errInTheWay is the reason that setAside logs for a layer that Open could not move.
var errInTheWay = errors.New("unusable layer in the place of a new one")

// errNothing is the error of publish's fill function if there is nothing to publish.
var errNothing = errors.New("nothing to publish")

// publish creates the directory dir atomically. fill writes its content under another name and
// returns its record.
func (s *Store) publish(dir, kind string, fill func(tmp string) (record any, err error)) error {
	return s.build(filepath.Base(dir), kind, fill, func(tmp string) error { return s.show(tmp, dir) })
}

// build creates a directory in four steps. fill writes the content and returns the record. build
// writes the record and syncs everything. place moves the directory to its destination. After an
// error build deletes the directory.
//
// The sync precedes place because a filesystem may commit the rename first. After a power failure
// the layer would then have empty files. One syncfs replaces an fsync for each file. On ext4 and
// XFS each fsync is a journal commit, and a layer may have 50,000 files.
func (s *Store) build(name, kind string, fill func(tmp string) (record any, err error),
	place func(tmp string) error) (err error) {
	failpoint.Reach("layer.make")
	tmp, err := os.MkdirTemp(filepath.Join(s.root, tmpDir), name+"-")
	if err != nil {
		return err
	}
	failpoint.Reach("layer.place-made")
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("discard "+tmp, func() error { return s.trash.Take(tmp, Usage{}) })
	since := s.syncs.Begin()
	record, err := fill(tmp)
	if err != nil {
		return err
	}
	failpoint.Reach("layer.filled")
	if err := writeRecord(tmp, kind, record); err != nil {
		return err
	}
	failpoint.Reach("layer.recorded")
	if err := s.syncs.Wait(since); err != nil {
		return fmt.Errorf("sync %s: %w", tmp, err)
	}
	failpoint.Reach("layer.synced")
	if err := place(tmp); err != nil {
		return err
	}
	undo.Release()
	return nil
}

// show renames tmp to dir durably. After an error tmp has its old name. If Open could not move an
// unusable directory at dir, show moves it to the set-aside folder.
func (s *Store) show(tmp, dir string) (err error) {
	rename := func() error { return unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE) }
	err = rename()
	if errors.Is(err, unix.EEXIST) {
		if err := s.setAside(dir, errInTheWay); err != nil {
			return err
		}
		err = rename()
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", tmp, dir, err)
	}
	failpoint.Reach("layer.renamed")
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("take back "+dir, func() error { return os.Rename(dir, tmp) })
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return err
	}
	undo.Release()
	failpoint.Reach("layer.shown")
	return nil
}

// Discard moves a directory on the store's filesystem to the trash, for deletion in the background.
// Its disk usage counts until it is deleted.
func (s *Store) Discard(dir string, used Usage) error { return s.trash.Take(dir, used) }

// Deletions returns a function that waits until the files that the caller removes from now on are
// deleted, see trash.Trash.Since.
func (s *Store) Deletions() (wait func(ctx context.Context)) { return s.trash.Since() }

// Remove removes a layer and its joins; their files are deleted in the background. A missing layer
// is no error. The caller ensures that nothing uses the layer.
func (s *Store) Remove(name digest.Digest) error {
	if s.layers.Get(name) == nil {
		return nil
	}
	layer, err := s.layers.Acquire(context.Background(), name)
	if err != nil {
		return fmt.Errorf("remove layer %s: %w", name, err)
	}
	defer layer.Release()
	info := layer.Value()
	if info == nil {
		return nil
	}
	layer.Set(nil)
	// Joins go first: one may hold the last name of a file of this layer.
	if err := s.removeJoins(name); err != nil {
		layer.Set(info)
		return fmt.Errorf("remove layer %s: %w", name, err)
	}
	if err := s.trash.Take(s.dirOf(info), s.lazy.usageOf(info)); err != nil {
		layer.Set(info)
		return fmt.Errorf("remove layer %s: %w", name, err)
	}
	if err := s.forgetLazy(name); err != nil {
		return fmt.Errorf("remove layer %s: %w", name, err)
	}
	return nil
}

// layerDir returns the directory of a layer. The path stays valid when the layer becomes complete.
func (s *Store) layerDir(name digest.Digest) string {
	if info := s.layers.Get(name); info != nil {
		return s.dirOf(info)
	}
	return filepath.Join(s.root, layersDir, name.Encoded())
}

func (s *Store) dirOf(info *Info) string {
	if info.Incomplete {
		return s.incompleteDir(info.Name)
	}
	return filepath.Join(s.root, layersDir, info.Name.Encoded())
}

func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync directory %s: %w", path, err)
	}
	return nil
}

// coded adds the gRPC code to errors of package unpack and of the filesystem.
func coded(err error) error {
	if errdefs.Code(err) != codes.Unknown {
		return err
	}
	if code := unpack.CodeOf(err); code != unpack.Unknown {
		return errdefs.New(codes.Code(code.Status()), "%w", err)
	}
	return err
}
