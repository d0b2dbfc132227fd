package image

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/checkpoint"
	"berth/image/layer"
	"berth/image/registry"
	"berth/image/registry/platform"
	"berth/image/unpack"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/lograte"
	"berth/internal/rootfs"
	"berth/internal/task"
)

// Config configures a Store.
type Config struct {
	Root                 string             // directory of the store, on the filesystem the containers' upper layers are on
	RegistryDirs         []string           // containerd's certs.d trees, the first with a directory for a host wins
	Unpack               layer.Unpacker     // makes files of blobs
	Limits               unpack.Limits      // of one layer; zero fields: unpack.DefaultLimits
	Reserve              layer.Reserve      // of the disk, which layers leave free; zero: none
	Pack                 layer.Packer       // makes EROFS layers of blobs
	Probe                func(string) error // tells whether EROFS layers in a directory could be mounted; nil: erofs.Probe
	MergeMemory          int64              // bytes for merging EROFS layers, of all images at a time; 0: erofs.MaxMemory
	WorkMemory           int64              // bytes that processes which unpack layers may keep of them (unpack.Limits.Memory and Window), all at a time; 0: what Limits say for each
	Driver               string             // form of layers, a rootfs.Kind, or "auto": EROFS where it can be mounted; empty: directory
	Pinned               []string           // references or IDs of images that kubelet must not collect
	MaxParallelDownloads int                // layers of one pull fetched at a time; 0: DefaultParallelDownloads
	MaxUnpacking         int                // layers of all pulls unpacked at a time; 0: DefaultUnpacking
	MaxRangeRequests     int                // parts of large layers fetched at a time beside that, see registry.Config.Spare; 0: none
	StallTimeout         time.Duration      // longest wait for a byte of a transfer; 0: one minute
	Platform             ocispec.Platform   // zero: this machine's
	DockerConfig         string             // docker's config.json with credentials; empty: none
	Waits                *task.Waits        // where waits are noted; nil: nowhere
}

// DefaultParallelDownloads is how many layers one pull fetches at a time where
// nothing is configured.
const DefaultParallelDownloads = 8

// DefaultUnpacking is how many layers are unpacked at a time where nothing is configured. Each takes some megabytes.
const DefaultUnpacking = 64

// Store is the node's image store.
type Store struct {
	cfg     Config
	log     *slog.Logger
	seldom  lograte.Limiter // for what sweeps cannot delete, which each of them tries
	client  *registry.Client
	layers  *stores
	records *checkpoint.Dir
	pinned  map[string]bool

	index    atomic.Pointer[index]
	sequence uint64          // of the last record written; the writer's
	stale    map[string]bool // IDs of images that have a tag on disk still which they have lost; the writer's
	writing  chan struct{}   // holds one token: whoever has it is the writer

	refs     *layerRefs
	flights  *flights
	turns    *turns
	memory   *workMemory
	pulls    pulls
	accesses accesses
	pullID   atomic.Uint64

	ctx       context.Context // of pulls and downloads, ends with shutdown
	shutdown  context.CancelFunc
	closeOnce func() error
}

// Open opens the store below cfg.Root, which is made if it does not exist.
// Records that are damaged are set aside and logged. The caller closes the store.
func Open(_ context.Context, cfg Config, log *slog.Logger) (_ *Store, err error) {
	pinned, err := pinnedNames(cfg.Pinned)
	if err != nil {
		return nil, err
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	layers, err := openStores(cfg, log)
	if err != nil {
		return nil, err
	}
	undo.Add("close layer store", layers.close)
	records, err := checkpoint.OpenDir(filepath.Join(cfg.Root, recordsDir), recordKind, recordVersion, checkpoint.Power)
	if err != nil {
		return nil, err
	}
	records.Note(cfg.Waits.Begin)
	s := newStore(cfg, layers, records, pinned, log)
	if err := s.load(); err != nil {
		return nil, err
	}
	undo.Release()
	return s, nil
}

func newStore(cfg Config, layers *stores, records *checkpoint.Dir, pinned map[string]bool, log *slog.Logger) *Store {
	if cfg.MaxParallelDownloads <= 0 {
		cfg.MaxParallelDownloads = DefaultParallelDownloads
	}
	if cfg.MaxUnpacking <= 0 {
		cfg.MaxUnpacking = DefaultUnpacking
	}
	if cfg.Platform.OS == "" {
		cfg.Platform = platform.Default()
	}
	cfg.Limits = cfg.Limits.WithDefaults()
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{
		cfg: cfg, log: log, layers: layers, records: records, pinned: pinned,
		client: registry.NewClient(registry.Config{
			Dirs: cfg.RegistryDirs, DockerConfig: cfg.DockerConfig, StallTimeout: cfg.StallTimeout, Spare: newTurns(cfg.MaxRangeRequests).takeNow,
		}),
		writing:  make(chan struct{}, 1),
		stale:    map[string]bool{},
		refs:     newLayerRefs(),
		flights:  newFlights(ctx, log),
		turns:    newTurns(cfg.MaxUnpacking),
		memory:   newWorkMemory(cfg.WorkMemory, cfg.MergeMemory, cfg.MaxUnpacking),
		ctx:      ctx,
		shutdown: cancel,
	}
	s.closeOnce = sync.OnceValue(s.close)
	return s
}

// Close ends pulls and waits until none of their work goes on. Pulls that are
// called later fail; no other method may be running or be called later, except
// those that only read. Closing again does nothing.
func (s *Store) Close() error { return s.closeOnce() }

func (s *Store) close() error {
	s.shutdown()
	s.pulls.close()
	s.flights.wait()
	return s.layers.close()
}

// load reads the records. A damaged record, and one with a layer missing, is set aside: the image has to be pulled again.
// If this kernel cannot mount the layers of an image, load removes the image and its layers.
func (s *Store) load() error {
	records := map[string]record{}
	unmountable := map[string]record{}
	damaged, err := s.records.Load(func(name string, version int, body []byte) error {
		id := "sha256:" + name
		rec, err := decodeRecord(id, body)
		if err != nil {
			return err
		}
		names := distinct(rec.layers())
		err = s.layers.has(names)
		switch {
		case err == nil:
			records[id] = rec
		case s.layers.isUnmountable(names):
			unmountable[id] = rec
		default:
			return err
		}
		return nil
	})
	if err != nil {
		return err
	}
	s.removeUnmountable(unmountable)
	for _, d := range damaged {
		s.log.Error("image record set aside; the image must be pulled again", "image", d.Name, "file", d.Path, "error", d.Err)
	}
	for id, rec := range records {
		s.sequence = max(s.sequence, rec.Sequence)
		s.refs.tryAcquire(imageOwner(id), rec.layers(), s.layers.home(distinct(rec.layers())).Kind()) // nothing is being deleted yet
	}
	for id, tags := range settleTags(records) {
		s.log.Warn("tags were moving between images when berth stopped; they belong to the newer one", "tags", tags, "older", id)
		records[id] = s.untag(id, records[id])
	}
	s.index.Store(newIndex(records, s.index.Load(), s.pinned))
	return nil
}

// removeUnmountable removes images that this kernel cannot mount, and then their layers. If that fails, on a filesystem that
// is read-only for example, the next start tries again.
func (s *Store) removeUnmountable(images map[string]record) {
	for id, rec := range images {
		s.sequence = max(s.sequence, rec.Sequence)
		if err := s.records.Remove(recordName(id)); err != nil {
			s.log.Warn("remove an image that this kernel cannot mount; the next start tries again", "image", id, "error", err)
			return
		}
		s.log.Warn("image removed: this kernel cannot mount its EROFS layers; it must be pulled again", "image", id, "tags", rec.Tags)
	}
	s.layers.removeUnmountable()
}

// settleTags gives a tag that two records have to the one written last: a tag
// moves by writing its new owner first. It returns the tags that records have lost, by ID. These are to be
// written: on disk they have the tags still, which would be theirs again with the newer record gone.
func settleTags(records map[string]record) (lost map[string][]string) {
	owner := map[string]string{}
	for _, id := range slices.Sorted(maps.Keys(records)) {
		for _, tag := range records[id].Tags {
			if other, taken := owner[tag]; !taken || records[other].Sequence < records[id].Sequence {
				owner[tag] = id
			}
		}
	}
	lost = map[string][]string{}
	for id, rec := range records {
		for _, tag := range rec.Tags {
			if owner[tag] != id {
				rec = rec.without(tag)
				lost[id] = append(lost[id], tag)
			}
		}
		records[id] = rec
	}
	return lost
}

// List returns all images, sorted by ID. The caller must not change the slice.
func (s *Store) List() []*Image { return s.index.Load().images }

// Get returns the image that ref names: an ID with or without "sha256:", the
// unique beginning of one (seven digits at least), a tag or a digest, with Docker
// Hub's short names. Errors: NotFound; InvalidArgument if ref is empty or several
// IDs begin with it.
func (s *Store) Get(ref string) (*Image, error) { return s.index.Load().find(ref) }

// Progress returns the pulls under way, oldest first.
func (s *Store) Progress() []PullProgress { return s.pulls.snapshot() }

// Driver is the form in which layers are made, see Config.
func (s *Store) Driver() rootfs.Kind { return s.layers.made.Kind() }

// Root returns the directory of images.
func (s *Store) Root() string { return s.cfg.Root }

// Usage is what the store takes on disk.
type Usage struct {
	Mountpoint    string // a path on the filesystem
	Bytes, Inodes uint64
}

// Usage returns what layers and records take on disk, from memory.
func (s *Store) Usage(context.Context) (Usage, error) {
	x := s.index.Load()
	used := s.layers.Usage()
	return Usage{Mountpoint: s.cfg.Root, Bytes: used.Bytes + x.bytes, Inodes: used.Inodes + uint64(len(x.records))}, nil
}

// Remove removes the image that ref names, with all its tags. Its layers go
// unless somebody else needs them. An unknown image is no error, nor is it one that
// something else, which nobody needs either, cannot be deleted.
func (s *Store) Remove(ctx context.Context, ref string) error {
	release, err := s.becomeWriter(ctx)
	if err != nil {
		return fmt.Errorf("remove image %s: %w", ref, err)
	}
	defer release()
	img, err := s.index.Load().find(ref)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove image: %w", err)
	}
	if err := s.remove(img.ID); err != nil {
		return err
	}
	s.log.Info("image removed", "image", img.ID, "tags", img.RepoTags)
	return nil
}

// remove removes an image for whoever is the writer, and what nobody needs then.
func (s *Store) remove(id string) error {
	if err := s.records.Remove(recordName(id)); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	records := maps.Clone(s.index.Load().records)
	delete(records, id)
	delete(s.stale, id)
	s.writeStale(records)
	s.index.Store(newIndex(records, s.index.Load(), s.pinned))
	layers := s.refs.release(imageOwner(id))
	if err := s.sweepAfter(layers); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	return nil
}

// Hold keeps layers (an image's, by their names, bottom first) alive for a holder and returns
// what to mount. Holding again is fine. Layers that are gone are NotFound.
//
// After an error the holder holds nothing, with two exceptions, because a container
// may be running on the layers whatever is wrong now: if it held them before, or if
// CollectGarbage has not been called, so that it may be an earlier daemon's.
func (s *Store) Hold(holder string, layers []digest.Digest) (rootfs.Spec, error) {
	if len(layers) == 0 {
		return rootfs.Spec{}, errdefs.FailedPrecondition("image has no layers")
	}
	owner := holderOwner(holder)
	held := s.refs.has(owner, layers)
	ctx, cancel := context.WithTimeout(s.ctx, holdTimeout)
	defer cancel()
	defer s.cfg.Waits.BeginUpTo(holdTimeout, "its layers to be stacked", holder)()
	if err := s.refs.acquire(ctx, owner, layers); err != nil {
		return rootfs.Spec{}, fmt.Errorf("root filesystem of %s: wait for layers that are being deleted: %w", holder, err)
	}
	list, err := s.layers.Stack(ctx, distinct(layers))
	if err != nil {
		if !held {
			s.refs.giveUp(owner)
		}
		return rootfs.Spec{}, fmt.Errorf("root filesystem of %s: %w", holder, err)
	}
	return rootfs.Spec{Layers: list}, nil
}

// holdTimeout is how long Hold may take. Where nothing is to be made of the layers it takes no time.
const holdTimeout = time.Minute

// Release ends what Hold began, and deletes the layers that nobody needs any
// more. A holder that is not known is no error, nor is it one that layers cannot be deleted
// which the holder did not have.
func (s *Store) Release(holder string) error {
	layers := s.refs.release(holderOwner(holder))
	if err := s.sweepAfter(layers); err != nil {
		return fmt.Errorf("release layers of %s: %w", holder, err)
	}
	return nil
}

// CollectGarbage deletes the layers that neither an image nor a holder has. The
// daemon calls it once, after the holders of its predecessor have called Hold;
// before that nothing is ever deleted.
func (s *Store) CollectGarbage(context.Context) error {
	s.refs.settle()
	if _, err := s.sweep(nil); err != nil {
		return fmt.Errorf("collect unused layers: %w", err)
	}
	return nil
}

// sweepAfter sweeps for somebody who has just given layers up: what fails with others is not theirs, and only logged.
func (s *Store) sweepAfter(given []digest.Digest) error {
	own, others := s.sweep(given)
	if others != nil {
		s.seldom.Warn(s.log, "layers that nobody needs could not be deleted and will be tried again", "error", others)
	}
	return own
}

// sweep deletes the layers that nobody needs, and what was set aside. It returns what has failed with its
// caller's own layers, and with anything else. That is tried again by the next sweep; the next daemon finds it, too.
func (s *Store) sweep(mine []digest.Digest) (own, others error) {
	if inUse, all := s.refs.held(); all {
		others = s.layers.DropSetAside(inUse)
	}
	others = errors.Join(others, s.sweepChains())
	for _, d := range s.refs.condemn(s.layers.list()) {
		end := s.cfg.Waits.Begin("its makers to end, to delete it", "layer "+d.name.String())
		err := s.layers.remove(d)
		end()
		s.refs.buried(d)
		switch {
		case err == nil:
		case slices.Contains(mine, d.name):
			own = errors.Join(own, err)
		default:
			others = errors.Join(others, err)
		}
	}
	return own, others
}

// sweepChains deletes the images of chains of layers that nobody needs any more, where the layers are others' too.
func (s *Store) sweepChains() (failed error) {
	for _, chain := range s.refs.condemnChains(s.layers.merged()) {
		failed = errors.Join(failed, s.layers.removeMerged(chain))
		s.refs.chainBuried(chain)
	}
	return failed
}

// becomeWriter waits for the right to change records and the index. Readers never
// do: whoever has it may be writing to disk.
func (s *Store) becomeWriter(ctx context.Context) (release func(), err error) {
	defer s.cfg.Waits.Begin("its turn to change the images", "image store")()
	select {
	case s.writing <- struct{}{}:
		return func() { <-s.writing }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// commit makes a pulled image, whose layers are in the store, durable and visible under a name. The caller holds
// them. If another image has the tag, it loses it.
func (s *Store) commit(ctx context.Context, ref registry.Reference, img *registry.Image, store *layer.Store) (*Image, error) {
	release, err := s.becomeWriter(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	x := s.index.Load()
	chain := layersOf(img)
	id, rec := x.place(img)
	if rec.Size, err = sizeOf(store, chain); err != nil { // in another form than before, perhaps
		return nil, err
	}
	records := maps.Clone(x.records)
	if records[id], err = s.write(id, rec.with(ref, img.Digest)); err != nil {
		return nil, err
	}
	for other, old := range x.records {
		if ref.Tag != "" && other != id && slices.Contains(old.Tags, ref.String()) {
			records[other] = s.untag(other, old.without(ref.String()))
		}
	}
	s.refs.tryAcquire(imageOwner(id), chain, store.Kind()) // the caller holds them: none is dying
	next := newIndex(records, s.index.Load(), s.pinned)
	s.index.Store(next)
	return next.byID[id], nil
}

// place returns the ID that a pulled image has or is to have, and its record. The image that has the ID
// may be another: one with the same configuration, and other blobs.
func (x *index) place(img *registry.Image) (id string, rec record) {
	rec = record{Config: img.RawConfig}
	for _, l := range img.Layers {
		rec.Blobs = append(rec.Blobs, l.Blob.Digest)
	}
	usual, other := img.ConfigDigest.String(), rec.otherID()
	if there, ok := x.records[other]; ok {
		return other, there
	}
	there, ok := x.records[usual]
	switch {
	case !ok:
		return usual, rec
	case slices.Equal(there.Blobs, rec.Blobs):
		return usual, there
	}
	return other, rec
}

// untag writes the record of an image that has lost its tag to another one. The
// other's record, which is newer, decides as long as it is there: failing to write this one, on a full
// disk say, changes nothing yet, and is made good by writeStale.
func (s *Store) untag(id string, rec record) record {
	written, err := s.write(id, rec)
	if err != nil {
		s.log.Warn("write the record of an image that has lost a tag", "image", id, "error", err)
		s.stale[id] = true
	}
	return written
}

// writeStale writes the records that untag could not write, for an image has been removed: it may be the one that
// has the tag now, and its removal makes room.
func (s *Store) writeStale(records map[string]record) {
	for _, id := range slices.Collect(maps.Keys(s.stale)) {
		records[id] = s.untag(id, records[id])
	}
}

// write writes a record with the next sequence number, of which each is used once.
func (s *Store) write(id string, rec record) (record, error) {
	s.sequence++
	rec.Sequence = s.sequence
	if err := s.records.Write(recordName(id), rec); err != nil {
		return rec, err
	}
	delete(s.stale, id)
	return rec, nil
}

// sizeOf adds up the layers of an image, each once.
func sizeOf(store *layer.Store, layers []digest.Digest) (uint64, error) {
	var total uint64
	for _, d := range distinct(layers) {
		info, err := store.Info(d)
		if err != nil {
			return 0, err
		}
		total += info.Bytes
	}
	return total, nil
}

// distinct drops all but the topmost of layers that an image has several times
// (Docker's empty layer, mostly). What they hold is seen in the topmost only, and
// overlayfs refuses to mount one directory twice.
func distinct(layers []digest.Digest) []digest.Digest {
	seen := map[digest.Digest]bool{}
	var list []digest.Digest
	for _, d := range slices.Backward(layers) {
		if !seen[d] {
			seen[d] = true
			list = append(list, d)
		}
	}
	slices.Reverse(list)
	return list
}

func recordName(id string) string      { return strings.TrimPrefix(id, "sha256:") }
func imageOwner(id string) string      { return "image " + id }
func holderOwner(holder string) string { return holderPrefix + holder }

// What the names of the owners begin with that are holders, and pulls.
const (
	holderPrefix = "holder "
	pullPrefix   = "pull "
)
