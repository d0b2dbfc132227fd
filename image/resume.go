package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/checkpoint"
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
	// expiryPeriod is the longest time between two searches for expired layers.
	expiryPeriod = 10 * time.Minute
	// expiryStop limits the wait for a deletion when the store is closed.
	expiryStop = 5 * time.Second
)

// finished are the layers that pulls have downloaded and whose images are not recorded yet. After a
// failed pull they remain for Config.PartialTTL. Records on disk keep them over a restart. Layers
// smaller than partial.MinSize are not among them.
type finished struct {
	dir *checkpoint.Dir

	mu     sync.Mutex // guards layers
	layers map[digest.Digest]finishedLayer
}

// finishedLayer is the record of a finished layer.
type finishedLayer struct {
	Layer digest.Digest `json:"layer"` // its name in the layer store
	Image string        `json:"image"` // that was pulled; its repository served the layer
	Time  time.Time     `json:"time"`
}

func (f *finished) set(l finishedLayer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.layers[l.Layer] = l
}

// origin returns the origin of a layer if it is a finished one.
func (f *finished) origin(ref registry.Reference, layer digest.Digest) origin {
	f.mu.Lock()
	defer f.mu.Unlock()
	return nameOrigin(ref, f.layers[layer].Image)
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

// openPartial opens what is kept of failed pulls and starts its expiry.
func (s *Store) openPartial() (err error) {
	root := filepath.Join(s.cfg.Root, partialDir)
	s.partial, err = partial.Open(partial.Config{
		Dir: filepath.Join(root, partialBlobs),
		TTL: s.cfg.PartialTTL,
		HasRoom: func(bytes uint64) error {
			return s.layers.primary.HasRoom(bytes, 0)
		},
		Log: s.log,
	})
	if err != nil {
		return err
	}
	if s.finished.dir, err = checkpoint.OpenDir(filepath.Join(root, partialLayers), finishedKind, finishedFormat,
		checkpoint.Process); err != nil {
		return err
	}
	if err := s.loadFinished(); err != nil {
		return err
	}
	s.expiry = task.NewLifetime()
	if s.cfg.PartialTTL > 0 {
		s.expiry.Spawn(func() { s.expire(s.expiry.Context()) })
	}
	return nil
}

// loadFinished reads the records of finished layers. It removes those of missing or expired layers;
// the layers are deleted by CollectGarbage.
func (s *Store) loadFinished() error {
	damaged, err := s.finished.dir.Load(func(name string, _ int, body []byte) error {
		var l finishedLayer
		if err := json.Unmarshal(body, &l); err != nil {
			return err
		}
		if l.Layer.Validate() != nil || l.Layer.Encoded() != name {
			return fmt.Errorf("record is about layer %q", l.Layer)
		}
		s.finished.set(l)
		s.refs.tryAcquire(finishedOwner(l.Layer), []digest.Digest{l.Layer}) // nothing is being deleted yet
		return nil
	})
	if err != nil {
		return err
	}
	for _, d := range damaged {
		s.log.Warn("record of a finished layer set aside", "layer", d.Name, "file", d.Path, "error", d.Err)
	}
	s.releaseFinished(func(l finishedLayer) bool {
		return s.hasExpired(l) || s.layers.has([]digest.Digest{l.Layer}) != nil
	})
	return nil
}

// InspectFinished lists the layers that failed pulls have left for the next one, for berth check. It
// changes nothing. root is Config.Root.
func InspectFinished(root string) (checkpoint.Survey, []digest.Digest, error) {
	var layers []digest.Digest
	survey, err := checkpoint.Inspect(filepath.Join(root, partialDir, partialLayers), finishedKind, finishedFormat,
		func(_ string, _ int, body []byte) error {
			var l finishedLayer
			err := json.Unmarshal(body, &l)
			layers = append(layers, l.Layer)
			return err
		})
	return survey, layers, err
}

func finishedOwner(layer digest.Digest) string { return finishedPrefix + layer.String() }

func (s *Store) hasExpired(l finishedLayer) bool { return time.Since(l.Time) >= s.cfg.PartialTTL }

// keepFinished keeps a layer that a pull has downloaded, whether or not the pull succeeds. The pull
// holds the layer.
func (s *Store) keepFinished(ref registry.Reference, l registry.Layer) {
	if s.cfg.PartialTTL <= 0 || l.Blob.Size < partial.MinSize {
		return
	}
	rec := finishedLayer{Layer: sourceOf(l).Name(), Image: ref.String(), Time: time.Now()}
	if err := s.finished.dir.Write(rec.Layer.Encoded(), rec); err != nil {
		s.log.Debug("a restart will not keep a finished layer", "layer", l.Blob.Digest, "error", err)
	}
	s.refs.tryAcquire(finishedOwner(rec.Layer), []digest.Digest{rec.Layer}) // the pull prevents its deletion
	s.finished.set(rec)
}

// settleFinished is called at the end of a pull with its result. The layers stay if the pull may
// succeed later. The caller sweeps.
func (s *Store) settleFinished(layers []digest.Digest, err error) {
	if isResumable(err) {
		return
	}
	mine := map[digest.Digest]bool{}
	for _, name := range layers {
		mine[name] = true
	}
	s.releaseFinished(func(l finishedLayer) bool { return mine[l.Layer] })
	if errors.Is(err, unix.ENOSPC) {
		s.dropPartial()
	}
}

// isResumable reports whether a failed pull may succeed with the bytes that it has received.
func isResumable(err error) bool {
	if err == nil || errors.Is(err, unix.ENOSPC) || errdefs.Code(err) == codes.DataLoss {
		return false
	}
	var down *registry.UnavailableError
	return !rejectsContent(err) || errors.As(err, &down) || errors.Is(err, context.Canceled)
}

// releaseFinished stops keeping the chosen layers. The next sweep deletes those that nothing needs.
func (s *Store) releaseFinished(chosen func(finishedLayer) bool) {
	for _, name := range s.finished.take(chosen) {
		if err := s.finished.dir.Remove(name.Encoded()); err != nil {
			s.log.Warn("delete record of a finished layer; the next start tries again", "layer", name, "error", err)
		}
		s.refs.release(finishedOwner(name))
	}
}

// dropPartial deletes everything that is kept of failed pulls.
func (s *Store) dropPartial() {
	if err := s.partial.Clear(); err != nil {
		s.warnings.Warn(s.log, "delete partial layers; will be retried", "error", err)
	}
	s.releaseFinished(func(finishedLayer) bool { return true })
	s.sweepQuietly()
}

// sweepQuietly sweeps and logs failures.
func (s *Store) sweepQuietly() {
	if _, err := s.sweep(nil); err != nil {
		s.warnings.Warn(s.log, "delete unused layers; will be retried", "error", err)
	}
}

// expire deletes what has been kept for Config.PartialTTL, until ctx is done.
func (s *Store) expire(ctx context.Context) {
	tick := time.NewTicker(min(max(s.cfg.PartialTTL/10, time.Second), expiryPeriod))
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

func (s *Store) expireAt(now time.Time) {
	if err := s.partial.Expire(now); err != nil {
		s.warnings.Warn(s.log, "delete partial layers; will be retried", "error", err)
	}
	s.releaseFinished(func(l finishedLayer) bool { return now.Sub(l.Time) >= s.cfg.PartialTTL })
	s.sweepQuietly()
}

// openKept opens what is kept of a layer and lets a blob begin with it. After corrupt content, when
// first is not 0, nothing is kept. received counts the bytes.
func (s *Store) openKept(
	blob *registry.Blob, repo *registry.Repository, l registry.Layer, first int, received *atomic.Int64,
) *partial.Blob {
	if first > 0 {
		return nil
	}
	kept := s.partial.Open(repo.Reference().Domain, l.Blob)
	content, size := kept.Had()
	if size > 0 {
		s.log.Info("resuming layer", "image", repo.Reference().String(), "layer", l.Blob.Digest, "bytes", size,
			"of", l.Blob.Size)
		received.Add(size)
		blob.ResumeFrom(content, size)
	}
	return kept
}

// endKept keeps the received bytes of a layer whose download has failed, if they may be of use.
func endKept(kept *partial.Blob, err error) {
	if isResumable(err) {
		kept.Keep()
	} else {
		kept.Discard()
	}
}
