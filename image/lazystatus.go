package image

import (
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/internal/errdefs"
)

// FetchedAnnotation is the annotation of an incomplete image in CRI's image lists: how much of it
// is on the node, such as "37 %". CRI has no field for it.
const FetchedAnnotation = "berth.fetched"

// LazyImage says what of an image is not fetched yet.
type LazyImage struct {
	Fetched int64       `json:"fetched"` // bytes of the blobs of incomplete layers
	Size    int64       `json:"size"`    // of these blobs
	Layers  []LazyLayer `json:"layers"`  // of the image, bottom first
}

// LazyLayer is a layer of a LazyImage.
type LazyLayer struct {
	Layer      digest.Digest `json:"layer"`              // diffID
	Incomplete bool          `json:"incomplete"`         // parts of its content are not there yet
	Fetched    int64         `json:"fetched,omitempty"`  // bytes of the blob of an incomplete layer
	Size       int64         `json:"size,omitempty"`     // of that blob
	Unproven   string        `json:"unproven,omitempty"` // what its index was made of, until that is proven: the table of contents
	Error      string        `json:"error,omitempty"`    // why it cannot be completed
	// FailedReads are reads that failed with EIO since the start, mostly because no host served the
	// content in time. LastFailedRead is the time of the last one.
	FailedReads    uint64     `json:"failedReads,omitempty"`
	LastFailedRead *time.Time `json:"lastFailedRead,omitempty"`
	// Decision is that of the last pull that had to get the layer. With the policy LazyOff, only
	// incomplete layers have one.
	Decision string `json:"decision,omitempty"`
}

// Percent returns how much of the incomplete layers is fetched.
func (l *LazyImage) Percent() string {
	return strconv.FormatInt(l.Fetched*100/max(l.Size, 1), 10) + " %"
}

// LazyStatus describes an image with incomplete layers, or one whose pull has decided about lazy
// layers; nil for others. It answers from memory.
func (s *Store) LazyStatus(img *Image) *LazyImage {
	config, err := img.Specification()
	if err != nil || len(config.RootFS.DiffIDs) != len(img.Layers) {
		return nil
	}
	status, some := &LazyImage{}, false
	decisions := s.incomplete.decisionsOf(img.Layers, img.decisions)
	for i, name := range img.Layers {
		l := LazyLayer{Layer: config.RootFS.DiffIDs[i]}
		incomplete := s.incomplete.get(name)
		if incomplete != nil || s.incomplete.cfg.Policy != LazyOff { // else it says nothing of interest
			l.Decision = decisions[name]
		}
		if incomplete != nil {
			l.Incomplete = true
			l.Fetched, l.Size = incomplete.Progress()
			if s.incomplete.layers.TOC(name) != nil {
				l.Unproven = "table of contents in the blob"
			}
			status.Fetched, status.Size = status.Fetched+l.Fetched, status.Size+l.Size
			if err := incomplete.Err(); err != nil {
				l.Error = err.Error()
			}
			if n, last := incomplete.Refused(); n > 0 {
				l.FailedReads, l.LastFailedRead = n, &last
			}
		}
		some = some || l.Incomplete || l.Decision != ""
		status.Layers = append(status.Layers, l)
	}
	if !some {
		return nil
	}
	return status
}

// Fetched returns how much of an incomplete image is on the node, or "" for a complete one.
func (s *Store) Fetched(img *Image) string {
	sum := LazyImage{}
	for _, name := range img.Layers {
		if l := s.incomplete.get(name); l != nil {
			fetched, size := l.Progress()
			sum.Fetched, sum.Size = sum.Fetched+fetched, sum.Size+size
		}
	}
	if sum.Size == 0 {
		return ""
	}
	return sum.Percent()
}

// LazyStats are figures of all incomplete layers. The counters begin at the start.
type LazyStats struct {
	Layers  int
	Missing uint64 // bytes of their content
	Waiting int    // reads that wait for content now
	Waited  uint64 // reads that had to wait
	Failed  uint64 // reads that failed with EIO
}

// LazyStats returns the figures. It answers from memory.
func (s *Store) LazyStats() (stats LazyStats) {
	z := s.incomplete
	if z.engine == nil {
		return stats
	}
	e := z.engine.Stats()
	stats = LazyStats{Layers: e.Layers, Waiting: e.Waiting, Waited: e.Waited, Failed: e.Denied}
	for _, name := range z.names() {
		if l := z.get(name); l != nil {
			stats.Missing += uint64(max(l.Missing(), 0))
		}
	}
	return stats
}

// names returns the names of the layers with a source.
func (z *incompleteLayers) names() (names []digest.Digest) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for name := range z.sources {
		names = append(names, name)
	}
	return names
}

// decided notes why a pull gets a layer lazily, or whole.
func (z *incompleteLayers) decided(name digest.Digest, reason string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.decisions[name] = errdefs.Clip(reason)
}

// decisionsOf returns what pulls have decided about layers: since the start, else what is recorded.
func (z *incompleteLayers) decisionsOf(layers []digest.Digest,
	recorded map[digest.Digest]string) map[digest.Digest]string {
	z.mu.Lock()
	defer z.mu.Unlock()
	var known map[digest.Digest]string
	for _, name := range layers {
		reason, recent := z.decisions[name]
		if !recent {
			reason = recorded[name]
		}
		if reason == "" {
			continue
		}
		if known == nil {
			known = map[digest.Digest]string{}
		}
		known[name] = errdefs.Clip(reason) // it can contain the error of a registry
	}
	return known
}
