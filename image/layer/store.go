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

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/internal/trash"
)

// Store keeps layers below one directory. Its methods may be called concurrently.
type Store struct {
	root        string
	driver      Driver
	log         *slog.Logger
	layers      *table[Info]
	joins       *table[join]
	trash       *trash.Trash
	stopDeleter func()   // waits for the goroutine that empties the trash
	home        *os.File // root; older than all that syncs brings to the disk
	syncs       *syncer
	reserve     Reserve
	statfs      func() (unix.Statfs_t, error) // of root
	aside       atomic.Bool                   // there may be something that was set aside
	effort      int64                         // what the joins of an image may take: allEffort
	making      atomic.Int64                  // bytes of the tars that have been read for layers being made
}

// Open opens the store in root, which is made if it does not exist and belongs
// to this Store alone, and starts its deleter. What an earlier Store left half
// made or half deleted is deleted in the background. Layers whose record is damaged, or
// that another driver made, are logged and set aside: they are pulled again. A record that
// can't be read for want of something, or that a newer berth wrote, is an error. No layer
// is made where less than the reserve is free.
func Open(root string, driver Driver, reserve Reserve, log *slog.Logger) (*Store, error) {
	s := &Store{root: root, driver: driver, log: log, layers: newTable[Info](), joins: newTable[join](), reserve: reserve, statfs: reserve.statfsOf(root), effort: allEffort}
	for _, dir := range []string{layersDir, joinsDir, tmpDir, trashDir} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o700); err != nil {
			return nil, fmt.Errorf("open layer store: %w", err)
		}
	}
	if err := spreadOverDisk(filepath.Join(root, tmpDir)); err != nil {
		log.Debug("layers are not spread over the disk", "error", err)
	}
	home, err := os.Open(root)
	if err != nil {
		return nil, fmt.Errorf("open layer store: %w", err)
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("close "+root, home.Close)
	s.home, s.syncs = home, newSyncer(home)
	s.trash = trash.New(filepath.Join(root, trashDir), driver.Remove, log)
	if err := s.load(); err != nil {
		return nil, fmt.Errorf("open layer store %s: %w", root, err)
	}
	if err := s.makeEmpty(); err != nil {
		return nil, fmt.Errorf("open layer store %s: make the empty layer: %w", root, err)
	}
	s.startDeleter()
	undo.Release()
	return s, nil
}

// startDeleter starts the goroutine that empties the trash.
func (s *Store) startDeleter() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.trash.Run(ctx) }()
	s.stopDeleter = func() { cancel(); <-done }
}

// makeEmpty makes the layer with nothing in it, see Stack.
func (s *Store) makeEmpty() error {
	if _, err := os.Lstat(s.emptyDir()); err == nil {
		return nil
	}
	return s.publish(s.emptyDir(), layerKind, func(dir string) (any, error) {
		return struct{}{}, s.driver.Empty(dir)
	})
}

func (s *Store) emptyDir() string { return filepath.Join(s.root, "empty-"+string(s.driver.Kind())) }

// Close ends the deleter; what it has not deleted yet goes at the next Open. No
// other method may be running or be called later.
func (s *Store) Close() error {
	s.stopDeleter()
	var failed error
	for _, j := range s.joins.All() {
		failed = errors.Join(failed, j.unmount())
	}
	return errors.Join(failed, s.home.Close())
}

// Kind is the form in which it keeps layers.
func (s *Store) Kind() rootfs.Kind { return s.driver.Kind() }

// Has reports whether the layer of that name is there.
func (s *Store) Has(name digest.Digest) bool { return s.layers.Get(name) != nil }

// Info returns what is known of a layer; NotFound if it is not there.
func (s *Store) Info(name digest.Digest) (Info, error) {
	info := s.layers.Get(name)
	if info == nil {
		return Info{}, errdefs.NotFound("layer %s is not there", name)
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

// Usage returns what all layers take on disk, those included that are being
// deleted, and, for those being made, the bytes of their tars that have arrived. It
// reads nothing: the sizes were counted when the layers were made.
func (s *Store) Usage() Usage {
	sum := s.trash.Usage()
	sum.Bytes += uint64(s.making.Load())
	for _, info := range s.layers.All() {
		sum = sum.Add(info.Usage)
	}
	for _, j := range s.joins.All() {
		sum = sum.Add(j.Usage)
	}
	return sum
}

// Create makes the layer of a source from the blob with its tar, in gzip, zstd or as it is,
// which it reads to its end (bytes behind the archive count for the diffID). That it is the source's
// blob, the reader checks. When Create
// returns nil the layer is visible and durable; on any error nothing of it is
// left. If the layer is there already, blob is not read. blob is read from another
// goroutine, which has ended when Create returns; its Read must return when ctx is
// done, and should when the layer has failed meanwhile, see unpack.Stopper.
//
// Calls for the same layer do not wait for each other's blob, which may come from a
// host that never ends: each makes the layer, and the first to finish is kept.
func (s *Store) Create(ctx context.Context, from Source, blob io.Reader, limits unpack.Limits) error {
	if err := from.Validate(); err != nil {
		return errdefs.InvalidArgument("layer: %w", err)
	}
	if s.Has(from.Name()) {
		return nil
	}
	return s.create(ctx, from, blob, unpack.Job{Limits: limits}, func(made unpack.Result) (tarBytes int64, err error) {
		if made.Digest != from.DiffID {
			return 0, errdefs.New(codes.DataLoss, "its %d bytes have the digest %s", made.TarBytes, made.Digest)
		}
		return made.TarBytes, nil
	})
}

// create makes a layer of a source from what stands for its blob. check tells how long the tar was, if the result is right.
func (s *Store) create(ctx context.Context, from Source, blob io.Reader, job unpack.Job, check func(unpack.Result) (tarBytes int64, err error)) error {
	var made record
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
	if err == errThere {
		return nil
	}
	if err != nil {
		return coded(fmt.Errorf("layer %s: %w", from.DiffID, err))
	}
	return nil
}

// tally adds to a sum, and takes it off at the end.
type tally struct {
	sum *atomic.Int64
	n   atomic.Int64
}

func (t *tally) more(n int) {
	t.n.Add(int64(n))
	t.sum.Add(int64(n))
}

func (t *tally) end() { t.sum.Add(-t.n.Load()) }

// errThere is returned by admit where another maker was faster.
var errThere = errors.New("the layer is there")

// admit makes the layer that was built in tmp visible, unless it is by now.
func (s *Store) admit(ctx context.Context, tmp string, info Info) error {
	layer, err := s.layers.Acquire(ctx, info.Name)
	if err != nil {
		return fmt.Errorf("wait for its other maker: %w", err)
	}
	defer layer.Release()
	if layer.Value() != nil {
		return errThere
	}
	if err := s.show(tmp, s.layerDir(info.Name)); err != nil {
		return err
	}
	layer.Set(&info)
	return nil
}

// apply lets the driver write the layer into dir.
func (s *Store) apply(ctx context.Context, dir string, from Source, blob io.Reader, job unpack.Job) (unpack.Result, error) {
	guarded, stop, err := s.guard(ctx)
	if err != nil {
		return unpack.Result{}, err
	}
	defer stop()
	made, err := s.driver.Apply(guarded, dir, blob, job)
	if err == nil && made.Unsupported > 0 {
		s.log.Warn("extended attributes of a layer dropped: the filesystem does not support them", "layer", from.DiffID, "count", made.Unsupported)
	}
	return made, err
}

// recordOf is the record of what was made in dir.
func (s *Store) recordOf(ctx context.Context, dir string, from Source, limits unpack.Limits, made unpack.Result, tarBytes int64) (_ record, err error) {
	info := Info{Name: from.Name(), Source: from, TarBytes: tarBytes, Kind: s.driver.Kind(), Summary: made.Summary}
	info.PendingLinks, info.ImpliedDirs = len(made.Links), len(made.Implied)
	if d, ok := s.driver.(TreeDigester); ok {
		info.Tree, err = d.TreeDigest(ctx, dir, limits.WithDefaults().Memory)
	}
	return record{info, made.Links, made.Implied}, err
}

// errInTheWay is why something is set aside that was found unusable before.
var errInTheWay = errors.New("it is in the place of a layer that was made anew")

// errNothing is returned by the fill function of publish when there is nothing to show.
var errNothing = errors.New("nothing to publish")

// publish makes a directory at dir, all at once: fill writes it under another
// name and returns its record, which is of the given kind.
func (s *Store) publish(dir, kind string, fill func(tmp string) (record any, err error)) error {
	return s.build(filepath.Base(dir), kind, fill, func(tmp string) error { return s.show(tmp, dir) })
}

// build lets fill write a directory and return its record, syncs everything, and
// hands it to place, which moves it to where it belongs. After an error nothing
// is left of it.
//
// The sync comes before place because a filesystem may commit the rename first:
// after a power failure the layer would be there, with empty files. It is a
// syncfs, not an fsync a file: on ext4 and xfs each fsync is a journal commit, of
// which a layer of 50,000 files would wait for one by one.
func (s *Store) build(name, kind string, fill func(tmp string) (record any, err error), place func(tmp string) error) (err error) {
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

// show gives what was built in tmp its name, durably; after an error it is in tmp. Nobody else is
// to be using the name; what Open could not set aside gives way.
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

// Discard moves a directory on the store's filesystem to the trash, to be deleted in the background.
func (s *Store) Discard(dir string) error { return s.trash.Take(dir, Usage{}) }

// Remove removes the layer and the joins it takes part in: by a rename, so that
// it returns at once; the files are deleted in the background. It is no error if
// the layer is not there. The caller sees to it that nothing uses the layer.
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
	// The joins first: one may hold the last name of a file of this layer.
	if err := s.removeJoins(name); err != nil {
		layer.Set(info)
		return fmt.Errorf("remove layer %s: %w", name, err)
	}
	if err := s.trash.Take(s.layerDir(name), info.Usage); err != nil {
		layer.Set(info)
		return fmt.Errorf("remove layer %s: %w", name, err)
	}
	return nil
}

func (s *Store) layerDir(name digest.Digest) string {
	return filepath.Join(s.root, layersDir, name.Encoded())
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

// coded gives the errors of package unpack, and those of the filesystem that mean something to a
// client, their code.
func coded(err error) error {
	if errdefs.Code(err) != codes.Unknown {
		return err
	}
	if code := unpack.CodeOf(err); code != unpack.Unknown {
		return errdefs.New(codes.Code(code.Status()), "%w", err)
	}
	return err
}
