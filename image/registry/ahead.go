package registry

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"berth/internal/errdefs"
)

const (
	// PartSize is the size of one range request, in bytes. The request takes so much memory.
	PartSize = 4 << 20
	// watchTime is how long a reader is observed before parts are fetched. Parts are fetched only
	// if the reader has waited for the network most of that time.
	watchTime = 200 * time.Millisecond
	// fastEnough is the minimum rate for fetching parts, in bytes a second. Parts share a saturated
	// line with all transfers. At this rate, each of 16 parts still gets twice the rate slowest.
	fastEnough = 32 * slowest
	// crawling is the share of fastEnough below which a part shows that the line is too slow for
	// more parts.
	crawling = 8
	// trialTime is how long parts are fetched before their benefit is judged. It includes the time
	// to connect.
	trialTime = 8 * watchTime
	// worthwhile is how many times faster a blob must arrive with parts.
	worthwhile = 1.25
)

// ahead fetches parts of a blob in advance while the reader waits for the network. Each part has
// its own connection. Many registries limit the rate of a connection. If a part fails, the reader
// fetches that range itself and no more parts are started. Until a registry is known to support
// ranges, one part is tried. Only the atomics may be used concurrently.
type ahead struct {
	partsConfig
	leave func() (giveBack func(), ok bool) // reserves the memory of a part until giveBack; nil: no parts

	parts   []*part            // by offset; the reader is before them or in the first
	buffers [][]byte           // free buffers of parts that the reader has passed
	cancel  context.CancelFunc // ends the fetches; nil: no fetch since clear
	ctx     context.Context    // of the fetches
	used    bool
	running sync.WaitGroup

	over    atomic.Bool  // no more parts are started
	ranges  atomic.Bool  // the registry is known to support ranges
	arrived atomic.Int64 // bytes received by transfer and parts while the reader is observed

	waited time.Duration // time that the reader waited for the network while it is observed
	since  sample        // the start of the observation
	begun  sample        // the start of the first part
	alone  float64       // the rate before the first part, see rate
}

// sample records bytes received and reader's waiting time at a point in time.
type sample struct {
	at      time.Time // zero: no sample
	arrived int64
	waited  time.Duration
}

func (a *ahead) sample(now time.Time) sample { return sample{now, a.arrived.Load(), a.waited} }

// rate returns the received bytes per second of waiting. This is the speed of the network, even if
// the reader was busy.
func (s sample) rate(since sample) float64 {
	return float64(s.arrived-since.arrived) / (s.waited - since.waited).Seconds()
}

// part is a range of a blob.
type part struct {
	offset   int64
	buf      []byte
	giveBack func()
	began    time.Time
	entered  bool          // the reader has reached it
	news     chan struct{} // holds a token if the reader has not seen the latest change

	mu sync.Mutex
	// +checklocks:mu
	arrived int // bytes of buf
	// +checklocks:mu
	whole time.Time // when the last byte arrived
	// +checklocks:mu
	err error // why the fetch failed; nil if it is complete or running
}

func (p *part) end() int64 { return p.offset + int64(len(p.buf)) }

// add records received bytes, or the end with an error.
func (p *part) add(n int, err error) {
	p.mu.Lock()
	p.arrived += n
	p.err = err
	if p.arrived == len(p.buf) {
		p.whole = time.Now()
	}
	p.mu.Unlock()
	select {
	case p.news <- struct{}{}:
	default:
	}
}

// read waits for bytes of the blob at an offset in the part.
func (p *part) read(ctx context.Context, to []byte, offset int64) (int, error) {
	for ctx.Err() == nil {
		p.mu.Lock()
		n, err := copy(to, p.buf[offset-p.offset:p.arrived]), p.err
		p.mu.Unlock()
		if n > 0 {
			return n, nil
		}
		if err != nil {
			return 0, err
		}
		select {
		case <-p.news:
		case <-ctx.Done():
		}
	}
	return 0, ctx.Err()
}

// at returns the part that contains an offset, or nil.
func (a *ahead) at(offset int64) *part {
	if len(a.parts) > 0 && a.parts[0].offset <= offset {
		return a.parts[0]
	}
	return nil
}

// limit returns how many bytes of size a transfer at an offset should still read.
func (a *ahead) limit(offset, size int64) int64 {
	if len(a.parts) > 0 {
		size = a.parts[0].offset
	}
	return size - offset
}

// drop abandons the first part after the reader has passed it, or after it has failed.
func (a *ahead) drop() {
	p := a.parts[0]
	a.parts = a.parts[1:]
	p.mu.Lock()
	whole := p.arrived == len(p.buf)
	p.mu.Unlock()
	if whole { // its fetch has ended
		a.buffers = append(a.buffers, p.buf[:cap(p.buf)])
	}
	p.giveBack()
}

// waits records how long the reader has waited for n bytes of its transfer. It reports whether to
// fetch parts.
func (a *ahead) waits(began, now time.Time, n int) bool {
	if a.over.Load() || a.leave == nil {
		return false
	}
	if a.since.at.IsZero() {
		a.since.at = began
	}
	a.arrived.Add(int64(n))
	a.waited += now.Sub(began)
	watched := now.Sub(a.since.at)
	if watched <= a.watch {
		return false
	}
	last, current := a.since, a.sample(now)
	a.since = current
	if current.waited-last.waited <= watched/2 || float64(current.arrived-last.arrived) < a.enough*watched.Seconds() {
		return false
	}
	if len(a.parts) == 0 {
		a.begun, a.alone = current, current.rate(last)
	}
	return true
}

// judge is called when the first part has been read. If the network is the bottleneck, it prevents
// further parts. That is so if the parts have not made the blob faster, or if a part was too slow.
func (a *ahead) judge(now time.Time) {
	p := a.parts[0]
	p.mu.Lock()
	took := p.whole.Sub(p.began)
	p.mu.Unlock()
	crawled := float64(len(p.buf)) < took.Seconds()*a.enough/crawling
	if crawled || now.Sub(a.begun.at) >= a.trial && a.sample(now).rate(a.begun) < worthwhile*a.alone {
		a.over.Store(true)
	}
}

// extend starts as many parts as memory is available for. A reader at an offset continues with its
// own transfer for the length of one part.
func (a *ahead) extend(ctx context.Context, offset, size int64, fetch func(ctx context.Context, p *part) error) {
	defer func() { a.buffers = nil }() // no memory is reserved for them
	next := offset + a.size
	if n := len(a.parts); n > 0 {
		next = a.parts[n-1].end()
	} else if next+a.size > size {
		return // the rest is too small for parts
	}
	for ; !a.over.Load() && next < size; next = a.parts[len(a.parts)-1].end() {
		if len(a.parts) > 0 && !a.ranges.Load() {
			return // only the trial part
		}
		giveBack, ok := a.leave()
		if !ok {
			return
		}
		p := &part{
			offset:   next,
			buf:      a.buffer()[:min(a.size, size-next)],
			giveBack: giveBack,
			began:    time.Now(),
			news:     make(chan struct{}, 1),
		}
		a.parts, a.used = append(a.parts, p), true
		a.begin(ctx, p, fetch)
	}
}

// begin starts fetching a part.
func (a *ahead) begin(ctx context.Context, p *part, fetch func(ctx context.Context, p *part) error) {
	if a.cancel == nil {
		a.ctx, a.cancel = context.WithCancel(ctx)
	}
	ctx = a.ctx
	a.running.Go(func() {
		if err := fetch(ctx, p); err != nil {
			if ctx.Err() == nil {
				a.over.Store(true)
			}
			p.add(0, err)
		}
	})
}

func (a *ahead) buffer() []byte {
	if n := len(a.buffers); n > 0 {
		b := a.buffers[n-1]
		a.buffers = a.buffers[:n-1]
		return b
	}
	return make([]byte, a.size)
}

// clear ends the fetches and drops all parts.
func (a *ahead) clear() {
	if a.cancel != nil {
		a.cancel()
		a.cancel = nil
	}
	a.running.Wait()
	for _, p := range a.parts {
		p.giveBack()
	}
	a.parts, a.buffers = nil, nil
}

// fetchPart fetches a part from a host. It runs concurrently with the blob's reader.
func (b *Blob) fetchPart(ctx context.Context, e *endpoint, p *part) error {
	last := p.end() - 1
	resp, err := e.request(ctx, http.MethodGet, b.path(), http.Header{"Accept": {"*/*"},
		"Range": {fmt.Sprintf("bytes=%d-%d", p.offset, last)}})
	if err != nil {
		return err
	}
	defer resp.Body.Close() // read only
	if resp.StatusCode != http.StatusPartialContent {
		return errdefs.Internal("answer %s to a request for a part", errdefs.Clip(resp.Status))
	}
	if got, err := rangeOf(resp, p.offset, b.want.Size); err != nil || got != last {
		return errdefs.Internal("a part that ends at %d, not %d: %w", got, last, err)
	}
	b.ahead.ranges.Store(true)
	for at := 0; at < len(p.buf); {
		n, err := resp.Body.Read(p.buf[at:])
		at += n
		b.ahead.arrived.Add(int64(n))
		p.add(n, nil)
		switch {
		case at == len(p.buf):
		case err == io.EOF:
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		}
	}
	return nil
}
