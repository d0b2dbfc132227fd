package lazy

import (
	"strconv"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/internal/errdefs"
)

// FetchedAnnotation is the annotation of an incomplete image in CRI's image lists. It says how much
// of the image is on the node, such as "37 %". CRI has no field for it.
const FetchedAnnotation = "berth.fetched"

// Status says which parts of an image are missing.
type Status struct {
	Fetched int64         `json:"fetched"` // bytes of the blobs of incomplete layers
	Size    int64         `json:"size"`    // bytes of these blobs when they are complete
	Layers  []LayerStatus `json:"layers"`  // of the image, bottom first
}

// LayerStatus is a layer of a Status.
type LayerStatus struct {
	Layer      digest.Digest `json:"layer"`              // diffID
	Incomplete bool          `json:"incomplete"`         // parts of its content are not there yet
	Fetched    int64         `json:"fetched,omitempty"`  // bytes of the blob of an incomplete layer
	Size       int64         `json:"size,omitempty"`     // of that blob
	Unproven   string        `json:"unproven,omitempty"` // the table of contents from which its index was made, until it is proven
	Error      string        `json:"error,omitempty"`    // why it cannot be completed
	// FailedReads are reads that failed with EIO since the start, mostly because no host served the
	// content in time. LastFailedRead is the time of the last failed read.
	FailedReads    uint64     `json:"failedReads,omitempty"`
	LastFailedRead *time.Time `json:"lastFailedRead,omitempty"`
	// Decision is the decision of the last pull that had to get the layer. If the policy is Off,
	// only incomplete layers have a decision.
	Decision string `json:"decision,omitempty"`
}

// Percent returns how much of the incomplete layers is fetched.
func (l *Status) Percent() string {
	return strconv.FormatInt(l.Fetched*100/max(l.Size, 1), 10) + " %"
}

// Status describes the lazy layers of an image. It is nil for an image without incomplete layers
// and without decisions about lazy layers. names are the names of the image's layers in the layer
// store. recorded are its recorded decisions. It answers from memory.
func (z *Layers) Status(names, diffIDs []digest.Digest, recorded map[digest.Digest]string) *Status {
	status, some := &Status{}, false
	decisions := z.Decisions(names, recorded)
	for i, name := range names {
		l := LayerStatus{Layer: diffIDs[i]}
		incomplete := z.Get(name)
		if incomplete != nil || z.Enabled() { // otherwise the status has no information
			l.Decision = decisions[name]
		}
		if incomplete != nil {
			l.Incomplete = true
			l.Fetched, l.Size = incomplete.Progress()
			if z.layers.TOC(name) != nil {
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

// Fetched returns how much of the layers of an incomplete image is on the node, or "" if they are
// complete.
func (z *Layers) Fetched(names []digest.Digest) string {
	sum := Status{}
	for _, name := range names {
		if l := z.Get(name); l != nil {
			fetched, size := l.Progress()
			sum.Fetched, sum.Size = sum.Fetched+fetched, sum.Size+size
		}
	}
	if sum.Size == 0 {
		return ""
	}
	return sum.Percent()
}

// Stats are figures of all incomplete layers. The counters begin at the start.
type Stats struct {
	Layers  int
	Missing uint64 // bytes of their content
	Waiting int    // reads that wait for content now
	Waited  uint64 // reads that had to wait
	Failed  uint64 // reads that failed with EIO
	// Failures counts failed attempts to fetch content.
	Failures uint64
}

// Stats returns the figures. It answers from memory.
func (z *Layers) Stats() (stats Stats) {
	if z.engine == nil {
		return stats
	}
	e := z.engine.Stats()
	stats = Stats{Layers: e.Layers, Waiting: e.Waiting, Waited: e.Waited, Failed: e.Denied, Failures: uint64(e.Failures)}
	for _, name := range z.names() {
		if l := z.Get(name); l != nil {
			stats.Missing += uint64(max(l.Missing(), 0))
		}
	}
	return stats
}

// names returns the names of the layers with a source.
func (z *Layers) names() (names []digest.Digest) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for name := range z.sources {
		names = append(names, name)
	}
	return names
}

// Decided notes why a pull gets a layer lazily, or whole.
func (z *Layers) Decided(name digest.Digest, reason string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.decisions[name] = errdefs.Clip(reason)
}

// Decisions returns the decisions of pulls about layers. Decisions since the start replace recorded
// ones.
func (z *Layers) Decisions(layers []digest.Digest,
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
