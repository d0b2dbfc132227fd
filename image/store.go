package image

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint/record"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/partial"
	"berth/image/registry"
	"berth/image/trust"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/lograte"
	"berth/internal/rootfs"
	"berth/internal/task"
)

// Config configures a Store.
type Config struct {
	Root string // directory of the store, on the filesystem of the containers' writable layers
	Settings
	Client      *registry.Client   // knows the short names of images
	Lazy        *lazy.Layers       // layers that are used before they are complete; the Store starts and closes it
	Unpack      layer.Unpacker     // unpacks blobs into files
	Pack        layer.Packer       // packs blobs into EROFS layers
	Reserve     layer.Reserve      // disk space that layers leave free; zero: none
	Probe       func(string) error // reports whether EROFS layers in a directory can be mounted; nil: erofs.Probe
	MergeMemory int64              // bytes for merging EROFS layers, of all images together; 0: erofs.MaxMemory
	Driver      string             // form of new layers: a rootfs.Kind, or "auto" for EROFS where the kernel mounts it; empty: directory
	PartialTTL  time.Duration      // how long layers and bytes of failed pulls are kept; 0: they are deleted
	Waits       *task.Waits        // records waits for verbose Status; nil: no recording
}

// Store is the node's image store. Its methods may be called concurrently.
type Store struct {
	cfg      Config
	log      *slog.Logger
	warnings lograte.Limiter // for layers that every sweep fails to delete
	lazy     *lazy.Layers
	layers   *stores
	refs     *layerRefs
	pullID   atomic.Uint64 // of the last owner that Acquire has made

	records    *record.Dir
	signatures *signatures
	snapshot   atomic.Pointer[Snapshot]
	writing    chan struct{}   // the writer's lock: holds one token; guards the fields below
	pinned     map[string]bool // names that kubelet must not collect
	sequence   uint64          // of the last record written
	stale      map[string]bool // IDs of images whose record on disk still has a tag that the image has lost

	partial  *partial.Store // bytes of layers whose transfer did not finish
	finished *finished      // layers of pulls that did not finish
	expiry   *task.Lifetime // of the goroutine that deletes both
	life     *task.Lifetime // of calls that Close ends
}

// Open opens the store below cfg.Root and creates the directory if needed. It moves damaged records
// out of the way and logs them. The caller closes the store.
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
	records, err := record.OpenDir(filepath.Join(cfg.Root, recordsDir), recordKind, recordVersion, record.Power)
	if err != nil {
		return nil, err
	}
	records.Note(cfg.Waits.Begin)
	s := &Store{cfg: cfg, log: log, lazy: cfg.Lazy, layers: layers, refs: newLayerRefs(), records: records, pinned: pinned,
		writing: make(chan struct{}, 1), stale: map[string]bool{}, finished: newFinished(), life: task.NewLifetime()}
	if s.signatures, err = openSignatures(cfg.Root, cfg.Trust, log); err != nil {
		return nil, err
	}
	if err := s.load(); err != nil {
		return nil, err
	}
	if err := s.openPartial(); err != nil {
		return nil, err
	}
	undo.Add("stop the expiry of partial layers", s.stopExpiry)
	if err := s.lazy.Start(s); err != nil {
		return nil, err
	}
	undo.Release()
	return s, nil
}

// Close waits for calls that use layers. The caller has ended all pulls. Only methods that read may
// run during or after Close.
func (s *Store) Close() error {
	s.life.Close()
	s.life.Cancel()
	return errors.Join(s.life.WaitFor(lifeStop), s.stopExpiry(), s.lazy.StopIndexing(), s.layers.close())
}

// lifeStop limits the wait for calls at Close.
const lifeStop = 30 * time.Second

func (s *Store) stopExpiry() error {
	s.expiry.Cancel()
	return s.expiry.WaitFor(expiryStop)
}

// load reads the records. It moves damaged records and records with a missing layer out of the way,
// and their images must be pulled again. It removes images with layers that this kernel cannot
// mount.
func (s *Store) load() error {
	records := map[string]imageRecord{}
	unmountable := map[string]imageRecord{}
	damaged, err := s.records.Load(func(name string, version int, body []byte) error {
		id := "sha256:" + name
		rec, err := decodeRecord(id, body)
		if err != nil {
			return err
		}
		names := Distinct(rec.layers())
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
		s.log.Error("image record set aside; the image must be pulled again", "image", d.Name, "file", d.Path,
			"error", d.Err)
	}
	for id, rec := range records {
		s.sequence = max(s.sequence, rec.Sequence)
		kind := s.layers.storeFor(Distinct(rec.layers())).Kind()
		s.refs.tryAcquire(imageOwner(id), rec.layers(), kind) // nothing is being deleted yet
	}
	for id, tags := range settleTags(records) {
		s.log.Warn("tags moved between images when berth stopped; the newer image keeps them", "tags", tags, "older", id)
		records[id] = s.untag(id, records[id])
	}
	s.snapshot.Store(newSnapshot(records, s.Snapshot(), s.pinned))
	if err := s.signatures.forgetAllBut(records); err != nil {
		s.log.Warn("delete signatures of removed images; the next start tries again", "error", err)
	}
	return nil
}

// removeUnmountable removes images that this kernel cannot mount, and then their layers. After a
// failure, for example on a read-only filesystem, the next start tries again.
func (s *Store) removeUnmountable(images map[string]imageRecord) {
	for id, rec := range images {
		s.sequence = max(s.sequence, rec.Sequence)
		if err := s.records.Remove(recordName(id)); err != nil {
			s.log.Warn("remove an image that this kernel cannot mount; the next start tries again", "image", id,
				"error", err)
			return
		}
		s.log.Warn("image removed: this kernel cannot mount its EROFS layers; it must be pulled again", "image", id,
			"tags", rec.Tags)
	}
	s.layers.removeUnmountable()
}

// settleTags decides who owns a tag that is in two records. The record written last owns it,
// because a pull writes the tag's new owner first. It returns the lost tags by image ID. The caller
// must write these records. Otherwise the older image would regain the tag when the newer image is
// removed.
func settleTags(records map[string]imageRecord) (lost map[string][]string) {
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
				rec = rec.losing(tag)
				lost[id] = append(lost[id], tag)
			}
		}
		records[id] = rec
	}
	return lost
}

// List returns all images, sorted by ID. The caller must not change the slice.
func (s *Store) List() []*Image { return s.Snapshot().images }

// Get returns the image that ref names. ref is a tag, a digest, an ID with or without "sha256:", or
// a unique prefix of an ID with at least seven digits. It accepts Docker Hub's short names. Errors:
// NotFound; InvalidArgument if ref is empty or several IDs match.
func (s *Store) Get(ref string) (*Image, error) { return s.find(ref) }

// find is Snapshot.find, and also expands short names as registries.conf says.
func (s *Store) find(ref string) (*Image, error) {
	x := s.Snapshot()
	hex, isID := strings.CutPrefix(ref, "sha256:")
	candidates, err := s.cfg.Client.Candidates(ref)
	if isID || err != nil { // also a name that is not valid or not allowed
		return x.find(ref)
	}
	for _, c := range candidates {
		if img, ok := x.byName[c.String()]; ok {
			return img, nil
		}
	}
	return x.findPrefix(ref, hex)
}

// Snapshot returns all images of this moment.
func (s *Store) Snapshot() *Snapshot { return s.snapshot.Load() }

// Driver returns the form of new layers, see Config.
func (s *Store) Driver() rootfs.Kind { return s.layers.primary.Kind() }

// Root returns the directory of the store.
func (s *Store) Root() string { return s.cfg.Root }

// Usage is the store's disk usage.
type Usage struct {
	Mountpoint    string // a path on the filesystem
	Bytes, Inodes uint64
}

// Usage returns the disk usage of layers and records. It does not read the disk.
func (s *Store) Usage(context.Context) (Usage, error) {
	x := s.Snapshot()
	used := s.layers.Usage()
	files, bytes := s.partial.Usage()
	indexes, indexBytes := s.lazy.Indexes() // files that are links to files of a layer count twice
	return Usage{Mountpoint: s.cfg.Root, Bytes: used.Bytes + x.bytes + uint64(bytes+indexBytes),
		Inodes: used.Inodes + uint64(len(x.records)+files+indexes)}, nil
}

// Remove removes the image that ref names, with all its tags, and the layers that only it needs. An
// unknown image is no error. Failures to delete other unneeded layers are only logged. The image
// disappears at once. Remove then waits until its space is free, but not longer than a minute or
// until ctx ends.
func (s *Store) Remove(ctx context.Context, ref string) error {
	deleted := s.layers.deletions()
	if err := s.removeNamed(ctx, ref); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life.Context(), cancel)()
	deleted(ctx)
	return nil
}

// removeNamed removes an image without a wait for its space.
func (s *Store) removeNamed(ctx context.Context, ref string) error {
	if _, err := s.find(ref); err == nil {
		s.dropPartial() // partial layers are deleted before complete images
	}
	release, err := s.lockWriter(ctx)
	if err != nil {
		return fmt.Errorf("remove image %s: %w", ref, err)
	}
	defer release()
	img, err := s.find(ref)
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

// remove removes an image and the layers that only it needs. The caller holds the writer's lock.
func (s *Store) remove(id string) error {
	if err := s.records.Remove(recordName(id)); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	if err := s.signatures.forget(id); err != nil {
		s.log.Warn("delete signatures of a removed image; the next start tries again", "image", id, "error", err)
	}
	records := maps.Clone(s.Snapshot().records)
	delete(records, id)
	delete(s.stale, id)
	s.writeStale(records)
	s.snapshot.Store(newSnapshot(records, s.Snapshot(), s.pinned))
	layers := s.refs.release(imageOwner(id))
	if err := s.sweepAfter(layers); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	return nil
}

// Hold keeps the layers of an image for a holder and returns the layers to mount. layers are names,
// bottom first. A holder may call Hold again. A missing layer is NotFound. An image without layers
// has nothing to hold, and its Spec is empty.
//
// After an error the holder holds nothing, unless a container may be running on the layers. That is
// so if the holder held the layers before. It is also so before CollectGarbage, because the
// container may be one of an earlier daemon.
func (s *Store) Hold(holder string, layers []digest.Digest) (rootfs.Spec, error) {
	if len(layers) == 0 {
		return rootfs.Spec{}, nil
	}
	owner := holderOwner(holder)
	held := s.refs.has(owner, layers)
	ctx, cancel := context.WithTimeout(s.life.Context(), holdTimeout)
	defer cancel()
	defer s.cfg.Waits.BeginUpTo(holdTimeout, "layer stacking", holder)()
	if err := s.refs.acquire(ctx, owner, layers); err != nil {
		return rootfs.Spec{}, fmt.Errorf("root filesystem of %s: wait for layer deletion: %w", holder, err)
	}
	keep := s.Keep(layers) // before Stack: a layer that is set aside meanwhile counts as incomplete
	list, err := s.layers.Stack(ctx, Distinct(layers))
	if err != nil {
		if !held {
			s.refs.releaseIfSettled(owner)
		}
		return rootfs.Spec{}, fmt.Errorf("root filesystem of %s: %w", holder, err)
	}
	return rootfs.Spec{Layers: list, Keep: keep}, nil
}

// Keep returns the files that a container on layers must hold open until it ends, or nil if all its
// layers are complete. A layer never becomes incomplete while it is held.
func (s *Store) Keep(layers []digest.Digest) []*os.File { return s.layers.keep(layers) }

// Complete reports whether all layers exist and are complete. It returns false if a container may
// still use an incomplete layer that was set aside.
func (s *Store) Complete(layers []digest.Digest) bool {
	retired, err := s.lazy.Retired(layers)
	return err == nil && !retired && s.layers.has(layers) == nil && s.Keep(layers) == nil
}

// holdTimeout limits Hold, which is fast unless it must create a join or a merged image.
const holdTimeout = time.Minute

// Release ends Hold and deletes the layers that only the holder needed. An unknown holder is no
// error. Failures to delete other unneeded layers are only logged.
func (s *Store) Release(holder string) error {
	layers := s.refs.release(holderOwner(holder))
	if err := s.sweepAfter(layers); err != nil {
		return fmt.Errorf("release layers of %s: %w", holder, err)
	}
	return nil
}

// CollectGarbage deletes the layers that neither an image nor a holder needs. The daemon calls it
// once, after the containers of its predecessor have called Hold. Nothing is deleted before.
func (s *Store) CollectGarbage(context.Context) error {
	s.refs.settle()
	if _, err := s.sweep(nil); err != nil {
		return fmt.Errorf("collect unused layers: %w", err)
	}
	return nil
}

// sweepAfter sweeps after a release of layers. It returns the failures for these layers and logs
// the others.
func (s *Store) sweepAfter(given []digest.Digest) error {
	own, others := s.sweep(given)
	if others != nil {
		s.warnings.Warn(s.log, "delete unused layers; will be retried", "error", others)
	}
	return own
}

// sweep deletes unneeded layers, including unusable ones that Open moved to the set-aside folder.
// It returns the failures for the caller's layers separately from the failures for others. The next
// sweep tries again.
func (s *Store) sweep(mine []digest.Digest) (own, others error) {
	if inUse, all := s.refs.held(); all {
		others = s.layers.DropSetAside(inUse)
	}
	others = errors.Join(others, s.sweepChains())
	for _, d := range s.refs.markDeleting(s.layers.list()) {
		end := s.cfg.Waits.Begin("concurrent layer creation", "layer "+d.name.String())
		err := s.layers.remove(d)
		end()
		s.refs.deleted(d)
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

// sweepChains deletes the merged images of layer chains without owner. Other images may need the
// layers.
func (s *Store) sweepChains() (failed error) {
	for _, chain := range s.refs.markChainsDeleting(s.layers.merged()) {
		failed = errors.Join(failed, s.layers.removeMerged(chain))
		s.refs.chainDeleted(chain)
	}
	return failed
}

// lockWriter takes the lock for changes of records and the Snapshot. Readers never wait for it,
// because its holder may be writing to disk.
func (s *Store) lockWriter(ctx context.Context) (release func(), err error) {
	defer s.cfg.Waits.Begin("image store lock", "image store")()
	select {
	case s.writing <- struct{}{}:
		return func() { <-s.writing }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Naming says under which names an image is recorded.
type Naming struct {
	Refs []registry.Reference // may be empty: the image has an ID only
	Pin  bool                 // whether kubelet must not collect the image

	Origin   string // of the archive that contains the image
	Registry string // that has served the image; empty: none

	Evidence *trust.Evidence // signatures to keep with the image; nil: none
}

// Commit writes the evidence and the record of a pulled image and makes it visible under its names.
// Another image with the same tag loses it. The caller has acquired the layers, and all are in the
// layer store.
func (s *Store) Commit(ctx context.Context, names Naming, img *registry.Image, store *layer.Store) (*Image, error) {
	release, err := s.lockWriter(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	x := s.Snapshot()
	chain := LayersOf(img)
	if err := s.lazy.Failed(chain); err != nil { // lazy.Layers.quarantine has removed the images of the layer, but not this new one
		return nil, err
	}
	id, rec := x.place(img)
	if rec.Size, err = sizeOf(store, chain); err != nil { // an earlier pull may have stored another form, which has another size
		return nil, err
	}
	for _, ref := range names.Refs {
		rec = rec.with(ref, img.Digest)
	}
	rec.Pinned = rec.Pinned || names.Pin
	if names.Origin != "" {
		rec = rec.from(names.Origin)
	}
	rec = rec.servedBy(names.Registry)
	rec.Decisions = s.lazy.Decisions(chain, rec.Decisions)
	records := maps.Clone(x.records)
	// Evidence without an image does no harm. An image without its evidence would be rejected.
	if err := s.signatures.keep(id, names.Evidence); err != nil {
		return nil, err
	}
	if err := s.put(records, id, rec); err != nil {
		return nil, err
	}
	s.refs.tryAcquire(imageOwner(id), chain, store.Kind()) // the caller holds the layers, so no deletion is under way
	next := newSnapshot(records, s.Snapshot(), s.pinned)
	s.snapshot.Store(next)
	return next.byID[id], nil
}

// put writes the record of an image, and then the records of the images that lose a tag to it. If
// an image loses its last tag, its archives are noted as origins of the new owner. Otherwise
// Preload would load them again after the removal of the image, and the tag would move back.
func (s *Store) put(records map[string]imageRecord, id string, rec imageRecord) (err error) {
	losers := map[string]imageRecord{}
	for other, old := range records {
		if left := old.losing(rec.Tags...); other != id && len(left.Tags) < len(old.Tags) {
			losers[other] = left
			if len(left.Tags) == 0 {
				rec = rec.from(left.Origins...)
			}
		}
	}
	if records[id], err = s.write(id, rec); err != nil {
		return err
	}
	for other, left := range losers {
		records[other] = s.untag(other, left)
	}
	return nil
}

// place returns the ID and the record of a pulled image, new or existing. If another image has the
// same configuration but other blobs, the ID is otherID.
func (x *Snapshot) place(img *registry.Image) (id string, rec imageRecord) {
	rec = imageRecord{Config: img.RawConfig}
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

// untag writes the record of an image that lost its tag to another one. A failure, for example on a
// full disk, is harmless while the newer record exists, because it owns the tag. writeStale tries
// again.
func (s *Store) untag(id string, rec imageRecord) imageRecord {
	written, err := s.write(id, rec)
	if err != nil {
		s.log.Warn("write record of image that lost a tag", "image", id, "error", err)
		s.stale[id] = true
	}
	return written
}

// writeStale writes the records that untag could not write. It runs after the removal of an image,
// which frees space. The removed image may also have owned the tag.
func (s *Store) writeStale(records map[string]imageRecord) {
	for _, id := range slices.Collect(maps.Keys(s.stale)) {
		records[id] = s.untag(id, records[id])
	}
}

// write writes a record with the next sequence number. No number is used twice.
func (s *Store) write(id string, rec imageRecord) (imageRecord, error) {
	s.sequence++
	rec.Sequence = s.sequence
	if err := s.records.Write(recordName(id), rec); err != nil {
		return rec, err
	}
	delete(s.stale, id)
	return rec, nil
}

// sizeOf adds up the distinct layers of an image.
func sizeOf(store *layer.Store, layers []digest.Digest) (uint64, error) {
	var total uint64
	for _, d := range Distinct(layers) {
		info, err := store.Info(d)
		if err != nil {
			return 0, err
		}
		total += info.Bytes
	}
	return total, nil
}

// If a layer is repeated, Distinct keeps only its topmost place. Mostly this is Docker's empty
// layer. Only the topmost place shows the content, and overlayfs refuses to mount a directory
// twice.
func Distinct(layers []digest.Digest) []digest.Digest {
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

// Prefixes of owner names.
const (
	holderPrefix = "holder "
	pullPrefix   = "pull "
)

// LayersOf returns the names of an image's layers in the layer store, bottom first.
func LayersOf(img *registry.Image) []digest.Digest {
	names := make([]digest.Digest, 0, len(img.Layers))
	for _, l := range img.Layers {
		names = append(names, lazy.SourceOf(l).Name())
	}
	return names
}

// LayerStore returns the layer store that has all layers of an image, or else the store for new
// layers.
func (s *Store) LayerStore(names []digest.Digest) *layer.Store {
	return s.layers.storeFor(Distinct(names))
}

// Fallback returns the layer store for an image that is too large for the driver of the given
// store, or nil.
func (s *Store) Fallback(store *layer.Store) *layer.Store { return s.layers.fallback(store) }

// Deleting returns the bytes of layers under deletion.
func (s *Store) Deleting() uint64 { return s.layers.deleting() }

// HasRoom returns ResourceExhausted if the disk's reserve is in use.
func (s *Store) HasRoom() error { return s.layers.primary.HasRoom(0, s.layers.deleting()) }

// Spool returns the directory for files of unfinished work, which the next start empties.
func (s *Store) Spool() string { return s.layers.spool() }

// HasLayer reports whether a layer is there in any form.
func (s *Store) HasLayer(name digest.Digest) bool { return s.layers.has([]digest.Digest{name}) == nil }

// OpenLayer opens the tar of a layer, which the caller has acquired.
func (s *Store) OpenLayer(name digest.Digest) (*layer.Tar, error) { return s.layers.openTar(name) }

// FinishedFor returns the image of a failed pull that has left a layer, or "". The image's
// repository has served the layer.
func (s *Store) FinishedFor(layer digest.Digest) string { return s.finished.imageOf(layer) }

// Lazy returns the layers that are used before they are complete.
func (s *Store) Lazy() *lazy.Layers { return s.lazy }

// Usable returns DataLoss if a layer cannot be completed. Containers must not start on it.
func (s *Store) Usable(layers []digest.Digest) error { return s.lazy.Failed(layers) }

// OnWrongFiles implements sandbox.Images, see lazy.Layers.OnWrongFiles.
func (s *Store) OnWrongFiles(kill func(layer digest.Digest, reason string)) {
	s.lazy.OnWrongFiles(kill)
}

// LazyStatus describes the lazy layers of an image. It is nil for an image without incomplete
// layers and without decisions about lazy layers. It answers from memory.
func (s *Store) LazyStatus(img *Image) *lazy.Status {
	config, err := img.Specification()
	if err != nil || len(config.RootFS.DiffIDs) != len(img.Layers) {
		return nil
	}
	return s.lazy.Status(img.Layers, config.RootFS.DiffIDs, img.decisions)
}

// Servers implements lazy.Images. It returns references of the images that have a layer, one for
// each repository that has served it.
func (s *Store) Servers(name digest.Digest) (refs []registry.Reference) {
	var names []string
	x := s.Snapshot()
	for id, rec := range x.records {
		if slices.Contains(x.byID[id].Layers, name) {
			names = append(names, rec.Digests...)
		}
	}
	if served := s.finished.imageOf(name); served != "" {
		names = append(names, served)
	}
	seen := map[string]bool{}
	for _, n := range names {
		ref, err := registry.ParseReference(n)
		if err == nil && !seen[ref.Name()] {
			seen[ref.Name()] = true
			refs = append(refs, ref)
		}
	}
	return refs
}

// RemoveWith implements lazy.Images. It removes all images with a layer that cannot be completed.
func (s *Store) RemoveWith(ctx context.Context, name digest.Digest, reason error) (failed error) {
	release, err := s.lockWriter(ctx)
	if err != nil {
		return err
	}
	defer release()
	if s.lazy.Failed([]digest.Digest{name}) == nil {
		return nil // the layer was removed, and perhaps created again
	}
	for _, img := range s.Snapshot().images {
		if !slices.Contains(img.Layers, name) {
			continue
		}
		s.log.Error("image removed: one of its layers cannot be completed; it must be pulled again", "image", img.ID,
			"tags", img.RepoTags, "layer", name, "error", reason)
		failed = errors.Join(failed, s.remove(img.ID))
	}
	return failed
}

// Fetched returns how much of an incomplete image is on the node, or "" for a complete one.
func (s *Store) Fetched(img *Image) string { return s.lazy.Fetched(img.Layers) }

// LazyStats returns figures of all incomplete layers. It answers from memory.
func (s *Store) LazyStats() lazy.Stats { return s.lazy.Stats() }

// Indexes returns the number of indexes of blobs and the bytes of their files.
func (s *Store) Indexes() (n int, bytes int64) { return s.lazy.Indexes() }

// DropIndexes removes the indexes of blobs. It returns how many bytes they had. The next pulls of
// their layers cannot be lazy.
func (s *Store) DropIndexes() (freed int64, err error) { return s.lazy.DropIndexes() }
