package pull

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/internal/errdefs"
)

// Progress describes a current pull.
type Progress struct {
	Ref     string          `json:"ref"`
	Started time.Time       `json:"started"`
	Layers  []LayerProgress `json:"layers"` // bottom first; empty until the manifest is known
}

// LayerProgress describes a layer of a pull.
type LayerProgress struct {
	Digest digest.Digest `json:"digest"` // of the blob
	State  LayerState    `json:"state"`
	Done   int64         `json:"done"`  // bytes of the blob so far
	Kept   int64         `json:"kept"`  // of them, from an earlier pull that failed
	Total  int64         `json:"total"` // bytes of the blob
}

// LayerState is the state of a layer in a pull.
type LayerState string

const (
	LayerWaiting     LayerState = "waiting"
	LayerDownloading LayerState = "downloading"
	LayerPresent     LayerState = "present" // was present before the pull
	LayerDone        LayerState = "done"
	LayerLazy        LayerState = "lazy" // can be used, and is fetched after the pull
)

// transfer counts the bytes of a download.
type transfer struct {
	at     atomic.Int64 // bytes of the blob so far
	kept   atomic.Int64 // the part of at that an earlier, failed pull has received
	shared atomic.Int64 // the part of at that a peer has sent, in proportion to its tar
	tar    atomic.Int64 // bytes of tars from peers, in all attempts
}

// reset begins the count of another attempt.
func (t *transfer) reset() {
	t.at.Store(0)
	t.kept.Store(0)
	t.shared.Store(0)
}

// pulls tracks the current pulls.
type pulls struct {
	wg sync.WaitGroup // counts the active pulls

	mu sync.Mutex
	// +checklocks:mu
	active []*pullTrack
	// +checklocks:mu
	closed bool
}

// pullTrack tracks one pull.
type pullTrack struct {
	ref      string
	started  time.Time
	registry string   // host of ref, empty if ref is invalid; only the pull's goroutine uses it
	hosts    []string // hosts that answered; only the pull's goroutine uses it
	layers   atomic.Pointer[[]*layerTrack]
}

// layerTrack tracks one layer of one pull.
type layerTrack struct {
	digest digest.Digest
	total  int64
	state  atomic.Pointer[LayerState]
	bytes  atomic.Pointer[transfer] // the download's counter; pulls may share it
}

// start adds a pull. The caller calls end when the pull has ended. It fails after close.
func (p *pulls) start(ref string) (*pullTrack, error) {
	t := &pullTrack{ref: ref, started: time.Now()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errdefs.Unavailable("image store is closed")
	}
	p.active = append(p.active, t)
	p.wg.Add(1)
	return t, nil
}

func (p *pulls) end(t *pullTrack) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active = slices.DeleteFunc(p.active, func(o *pullTrack) bool { return o == t })
	p.wg.Done()
}

// close makes start fail and waits for the current pulls, which the caller has canceled.
func (p *pulls) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.wg.Wait()
}

// snapshot returns the current pulls, oldest first.
func (p *pulls) snapshot() []Progress {
	p.mu.Lock()
	active := slices.Clone(p.active)
	p.mu.Unlock()
	all := make([]Progress, 0, len(active))
	for _, t := range active {
		all = append(all, t.snapshot())
	}
	return all
}

// received returns the bytes of layers that the pull received from registries. They include shared
// downloads.
func (t *pullTrack) received() (bytes int64) {
	layers := t.layers.Load()
	if layers == nil {
		return 0
	}
	for _, l := range *layers {
		if b := l.bytes.Load(); b != nil {
			bytes += max(b.at.Load()-b.kept.Load()-b.shared.Load(), 0)
		}
	}
	return bytes
}

// fromPeers returns the bytes of layers that the pull received from peers.
func (t *pullTrack) fromPeers() (bytes int64) {
	layers := t.layers.Load()
	if layers == nil {
		return 0
	}
	for _, l := range *layers {
		if b := l.bytes.Load(); b != nil {
			bytes += b.tar.Load()
		}
	}
	return bytes
}

func (t *pullTrack) snapshot() Progress {
	s := Progress{Ref: t.ref, Started: t.started, Layers: []LayerProgress{}}
	if layers := t.layers.Load(); layers != nil {
		for _, l := range *layers {
			s.Layers = append(s.Layers, l.snapshot())
		}
	}
	return s
}

// setLayers starts tracking the layers of the image.
func (t *pullTrack) setLayers(layers []registry.Layer) []*layerTrack {
	tracks := make([]*layerTrack, 0, len(layers))
	for _, l := range layers {
		lt := &layerTrack{digest: l.Blob.Digest, total: l.Blob.Size}
		lt.set(LayerWaiting)
		tracks = append(tracks, lt)
	}
	t.layers.Store(&tracks)
	return tracks
}

func (l *layerTrack) set(s LayerState) { l.state.Store(&s) }

// downloading sets the counter of the layer's download.
func (l *layerTrack) downloading(bytes *transfer) {
	l.bytes.Store(bytes)
	l.set(LayerDownloading)
}

func (l *layerTrack) snapshot() LayerProgress {
	p := LayerProgress{Digest: l.digest, State: *l.state.Load(), Total: l.total}
	if b := l.bytes.Load(); b != nil {
		p.Done, p.Kept = min(b.at.Load(), p.Total), b.kept.Load()
	}
	if p.State == LayerPresent || p.State == LayerDone {
		p.Done = p.Total
	}
	return p
}
