package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/record"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/partial"
	"berth/image/registry"
	"berth/internal/errdefs"
	"berth/internal/task"
)

const (
	// partialDir has what is kept of failed pulls, below the directory of the store.
	partialDir     = "partial"
	partialBlobs   = "blobs"  // see package partial
	partialLayers  = "layers" // records of finished layers
	finishedKind   = "finished-layer"
	finishedFormat = 1
	finishedPrefix = "finished " // of the owners of finished layers
	// maxFinished limits the bytes of finished layers. Blobs up to the limit of unfinished blobs
	// usually unpack to so many bytes.
	maxFinished = 4 * partial.DefaultMaxBytes
	// expiryPeriod is the longest time between two searches for expired layers.
	expiryPeriod = 10 * time.Minute
	// expiryStop limits the wait for a deletion when the store is closed.
	expiryStop = 5 * time.Second
)

// finished are the layers that pulls have downloaded and whose images are not recorded yet. After a
// failed pull they remain for Config.PartialTTL. Records on disk keep them over a restart. Layers
// smaller than partial.MinSize are not kept.
type finished struct {
	dir  *record.Dir
	most uint64 // bytes

	mu sync.Mutex
	// +checklocks:mu
	layers map[digest.Digest]finishedLayer
}

// finishedLayer is the record of a finished layer.
type finishedLayer struct {
	Layer digest.Digest `json:"layer"` // its name in the layer store
	Image string        `json:"image"` // the image that was pulled; its repository served the layer
	Time  time.Time     `json:"time"`
}

func newFinished() *finished {
	return &finished{most: maxFinished, layers: map[digest.Digest]finishedLayer{}}
}

func (f *finished) set(l finishedLayer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.layers[l.Layer] = l
}

// imageOf returns the image whose repository has served a finished layer, or "".
func (f *finished) imageOf(layer digest.Digest) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.layers[layer].Image
}

// take removes the chosen layers and returns them.
func (f *finished) take(chosen func(finishedLayer) bool) (taken []digest.Digest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, l := range f.layers {
		if chosen(l) {
			taken = append(taken, name)
			delete(f.layers, name)
		}
	}
	return taken
}

// list returns the finished layers, oldest first.
func (f *finished) list() []finishedLayer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.SortedFunc(maps.Values(f.layers), func(a, b finishedLayer) int { return a.Time.Compare(b.Time) })
}

// openPartial opens what is kept of failed pulls and starts its expiry.
func (s *Store) openPartial() (err error) {
	root := filepath.Join(s.cfg.Root, partialDir)
	s.partial, err = partial.Open(partial.Config{
		Dir:     filepath.Join(root, partialBlobs),
		TTL:     s.cfg.PartialTTL,
		HasRoom: func(bytes uint64) error { return s.layers.primary.Spare(bytes, 0) },
		Log:     s.log,
	})
	if err != nil {
		return err
	}
	if s.finished.dir, err = record.OpenDir(filepath.Join(root, partialLayers), finishedKind, finishedFormat,
		record.Process); err != nil {
		return err
	}
	if err := s.loadFinished(); err != nil {
		return err
	}
	s.layers.reclaim, s.layers.reclaimable = s.reclaim, s.reclaimable
	s.expiry = task.NewLifetime()
	if s.cfg.PartialTTL > 0 {
		s.expiry.Spawn(func() { s.expire(s.expiry.Context()) })
	}
	return nil
}

// loadFinished reads the records of finished layers. It removes the records of missing or expired
// layers, and of layers that have an image. CollectGarbage deletes unused layers.
func (s *Store) loadFinished() error {
	now := time.Now()
	damaged, err := s.finished.dir.Load(func(name string, _ int, body []byte) error {
		var l finishedLayer
		if err := json.Unmarshal(body, &l); err != nil {
			return err
		}
		if l.Layer.Validate() != nil || l.Layer.Encoded() != name {
			return fmt.Errorf("record is about layer %q", l.Layer)
		}
		if l.Time.After(now) { // the clock was wrong
			l.Time = now
		}
		s.finished.set(l)
		s.refs.tryAcquire(finishedOwner(l.Layer), []digest.Digest{l.Layer}) // nothing is being deleted yet
		return nil
	})
	if err != nil {
		return err
	}
	if len(damaged) > 0 {
		s.log.Info("finished layers of failed pulls are fetched again: their records were damaged", "records", len(damaged))
	}
	// Records are not synced, so a power cut may damage them. Nobody needs to examine them.
	if err := os.RemoveAll(filepath.Join(s.cfg.Root, partialDir, partialLayers, record.SetAsideDir)); err != nil {
		s.log.Warn("delete damaged records of finished layers; the next start tries again", "error", err)
	}
	imaged := s.imaged()
	s.releaseFinished(func(l finishedLayer) bool {
		return s.hasExpired(l) || imaged[l.Layer] || s.layers.has([]digest.Digest{l.Layer}) != nil
	})
	s.limitFinished()
	return nil
}

// imaged returns the layers of all recorded images.
func (s *Store) imaged() map[digest.Digest]bool {
	layers := map[digest.Digest]bool{}
	for _, img := range s.Snapshot().images {
		for _, name := range img.Layers {
			layers[name] = true
		}
	}
	return layers
}

// PartialSurvey is what failed pulls have left on disk.
type PartialSurvey struct {
	Records record.Survey   // of finished layers
	Layers  []digest.Digest // the finished layers
	Unknown []string        // paths of entries that are not partial layers
	Expired []string        // paths of entries that a running daemon would have deleted
}

// InspectPartial reads what failed pulls have left for the next one, for berth check. It changes
// nothing. root and ttl are Config.Root and Config.PartialTTL.
func InspectPartial(root string, ttl time.Duration) (*PartialSurvey, error) {
	dir := filepath.Join(root, partialDir)
	deadline := time.Now().Add(-ttl - 2*expiryInterval(ttl))
	found := &PartialSurvey{}
	if err := found.readFolder(dir); err != nil {
		return nil, err
	}
	files, others, err := partial.Inspect(filepath.Join(dir, partialBlobs))
	if err != nil {
		return nil, err
	}
	for _, name := range others {
		found.Unknown = append(found.Unknown, filepath.Join(dir, partialBlobs, name))
	}
	for _, f := range files {
		if f.Changed.Before(deadline) {
			found.Expired = append(found.Expired, filepath.Join(dir, partialBlobs, f.Name))
		}
	}
	found.Records, err = record.Inspect(filepath.Join(dir, partialLayers), finishedKind, finishedFormat,
		func(name string, _ int, body []byte) error {
			var l finishedLayer
			if err := json.Unmarshal(body, &l); err != nil {
				return err
			}
			found.Layers = append(found.Layers, l.Layer)
			if l.Time.Before(deadline) {
				found.Expired = append(found.Expired, filepath.Join(dir, partialLayers, name+".record"))
			}
			return nil
		})
	return found, err
}

// readFolder finds unknown entries of the folder of partial layers.
func (p *PartialSurvey) readFolder(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list partial layers: %w", err)
	}
	for _, e := range entries {
		if name := e.Name(); !e.IsDir() || name != partialBlobs && name != partialLayers {
			p.Unknown = append(p.Unknown, filepath.Join(dir, name))
		}
	}
	return nil
}

func finishedOwner(layer digest.Digest) string { return finishedPrefix + layer.String() }

func (s *Store) hasExpired(l finishedLayer) bool { return time.Since(l.Time) >= s.cfg.PartialTTL }

// KeepFinished keeps a layer that a pull has downloaded, whether or not the pull succeeds. The pull
// holds the layer.
func (s *Store) KeepFinished(ref registry.Reference, l registry.Layer) {
	if s.cfg.PartialTTL <= 0 || l.Blob.Size < partial.MinSize {
		return
	}
	rec := finishedLayer{Layer: lazy.SourceOf(l).Name(), Image: ref.String(), Time: time.Now()}
	if err := s.finished.dir.Write(rec.Layer.Encoded(), rec); err != nil {
		s.log.Debug("a restart will not keep a finished layer", "layer", l.Blob.Digest, "error", err)
	}
	s.refs.tryAcquire(finishedOwner(rec.Layer), []digest.Digest{rec.Layer}) // the pull prevents its deletion
	s.finished.set(rec)
	s.limitFinished()
}

// limitFinished stops keeping the oldest finished layers until the others are within the limit.
// Layers of images do not count.
func (s *Store) limitFinished() {
	var sum uint64
	tooMany := map[digest.Digest]bool{}
	imaged := s.imaged()
	for _, l := range slices.Backward(s.finished.list()) {
		if imaged[l.Layer] {
			continue
		}
		if sum += s.layers.bytes(l.Layer); sum > s.finished.most {
			tooMany[l.Layer] = true
		}
	}
	if len(tooMany) > 0 {
		s.releaseFinished(func(l finishedLayer) bool { return tooMany[l.Layer] })
	}
}

// SettleFinished is called at the end of a pull with its result. Finished layers stay if the pull
// may succeed later. After another failure, only layers that the pull's repository has served are
// released. A bad image of one user must not cost another user's layers. The caller sweeps.
func (s *Store) SettleFinished(refs []registry.Reference, layers []digest.Digest, err error) {
	if IsResumable(err) {
		return
	}
	own := func(l finishedLayer) bool {
		return slices.ContainsFunc(refs, func(ref registry.Reference) bool {
			return OriginOf(ref, l.Image) == FromRepository
		})
	}
	s.releaseFinished(func(l finishedLayer) bool { return slices.Contains(layers, l.Layer) && (err == nil || own(l)) })
	var claimed layer.ClaimError
	if errors.Is(err, unix.ENOSPC) && !errors.As(err, &claimed) {
		s.dropIndexes()
		s.dropPartial()
	}
}

// IsResumable reports whether a failed pull may succeed with the bytes that it has received.
func IsResumable(err error) bool {
	if err == nil || errors.Is(err, unix.ENOSPC) || errdefs.Code(err) == codes.DataLoss {
		return false
	}
	var down *registry.UnavailableError
	return !layer.RejectsContent(err) || errors.As(err, &down) || errors.Is(err, context.Canceled)
}

// releaseFinished stops keeping the chosen layers. The next sweep deletes the layers that nothing
// needs.
func (s *Store) releaseFinished(chosen func(finishedLayer) bool) {
	for _, name := range s.finished.take(chosen) {
		if err := s.finished.dir.Remove(name.Encoded()); err != nil {
			s.log.Warn("delete record of a finished layer; the next start tries again", "layer", name, "error", err)
		}
		s.refs.release(finishedOwner(name))
	}
}

// dropPartial deletes everything that is kept of failed pulls.
func (s *Store) dropPartial() { s.drop(s.partial.Clear) }

// reclaimable returns the bytes that reclaim can free at the most.
func (s *Store) reclaimable() uint64 {
	_, indexes := s.lazy.Indexes()
	return uint64(indexes) + s.Partial().Bytes
}

// reclaim deletes the indexes of blobs and everything that is kept of failed pulls. It also deletes
// the bytes that current pulls would keep. It returns the bytes of layers under deletion.
func (s *Store) reclaim() (freeing uint64) {
	s.dropIndexes()
	if files, _ := s.partial.Usage(); files > 0 || len(s.finished.list()) > 0 {
		s.drop(s.partial.Reclaim)
		s.warnings.Warn(s.log, "disk space is short: partial layers of failed pulls are deleted")
	}
	return s.layers.deleting()
}

// drop deletes finished layers, except those of current pulls, which may still fail. removeFiles
// deletes the files of unfinished layers.
func (s *Store) drop(removeFiles func() error) {
	if err := removeFiles(); err != nil {
		s.warnings.Warn(s.log, "delete partial layers; will be retried", "error", err)
	}
	s.releaseFinished(func(l finishedLayer) bool { return !s.refs.isPulled(l.Layer) })
	s.sweepQuietly()
}

// Partial describes what is kept of pulls that have not succeeded.
type Partial struct {
	Unfinished int    // layers with received bytes
	Finished   int    // complete layers that no image has
	Bytes      uint64 // on disk, of both
}

// Partial returns what is kept of pulls that have not succeeded, including the content of current
// pulls.
func (s *Store) Partial() Partial {
	files, bytes := s.partial.Usage()
	p := Partial{Unfinished: files, Bytes: uint64(bytes)}
	imaged := s.imaged()
	for _, l := range s.finished.list() {
		if !imaged[l.Layer] {
			p.Finished++
			p.Bytes += s.layers.bytes(l.Layer)
		}
	}
	return p
}

// RemovePartial deletes what is kept of failed pulls, and returns what was deleted. Files that
// current pulls write stay until their end.
func (s *Store) RemovePartial() (removed Partial) {
	before := s.Partial()
	s.dropPartial()
	after := s.Partial()
	return Partial{
		Unfinished: max(before.Unfinished-after.Unfinished, 0),
		Finished:   max(before.Finished-after.Finished, 0),
		Bytes:      before.Bytes - min(after.Bytes, before.Bytes),
	}
}

// dropIndexes deletes the indexes of blobs, because the disk is short of space.
func (s *Store) dropIndexes() {
	if _, err := s.lazy.DropIndexes(); err != nil {
		s.warnings.Warn(s.log, "delete indexes of blobs; will be retried", "error", err)
	}
}

// sweepQuietly sweeps and logs failures.
func (s *Store) sweepQuietly() {
	if _, err := s.sweep(nil); err != nil {
		s.warnings.Warn(s.log, "delete unused layers; will be retried", "error", err)
	}
}

// expire deletes what has been kept for Config.PartialTTL, until ctx is done.
func (s *Store) expire(ctx context.Context) {
	tick := time.NewTicker(expiryInterval(s.cfg.PartialTTL))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.expireAt(now)
		}
	}
}

// expiryInterval returns the time between two searches for expired layers.
func expiryInterval(ttl time.Duration) time.Duration {
	return min(max(ttl/10, time.Second), expiryPeriod)
}

func (s *Store) expireAt(now time.Time) {
	if err := s.partial.Expire(now); err != nil {
		s.warnings.Warn(s.log, "delete partial layers; will be retried", "error", err)
	}
	s.releaseFinished(func(l finishedLayer) bool { return now.Sub(l.Time) >= s.cfg.PartialTTL })
	s.sweepQuietly()
}

// OpenPartial opens the kept bytes of a blob for a transfer from a repository.
func (s *Store) OpenPartial(repository string, blob ocispec.Descriptor) *partial.Blob {
	return s.partial.Open(repository, blob)
}
