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
	// PartSize is how much of a blob one range request is for, and the memory that it takes.
	PartSize = 4 << 20
	// watchTime is how long a reader is watched before parts are fetched for it: most of this time it has waited for the network.
	watchTime = 200 * time.Millisecond
	// fastEnough is the rate, in bytes a second, from which parts are fetched for a reader. On a line that is full they share it with the
	// transfers of all layers: shared with 16 parts this still is twice slowest.
	fastEnough = 32 * slowest
	// crawling is the share of fastEnough below which a part shows that the line has become too slow for more.
	crawling = 8
	// trialTime is how long parts are fetched before they must have been worth it: connecting takes some of it.
	trialTime = 8 * watchTime
	// worthwhile is how many times as fast a blob must come with parts as without them.
	worthwhile = 1.25
)

// ahead fetches parts of a blob that its reader has not come to, each by a connection of its own, while the reader waits for the
// network: many registries give a connection so much and no more. Whatever goes wrong with a part, the reader fetches that piece of the
// blob as if there were no parts, and no more of them are begun. Until a registry is known to have ranges, one part is tried. It is the
// reader's: not safe for concurrent use, but for the atomics, which fetches change.
type ahead struct {
	partsConfig
	leave func() (giveBack func(), ok bool) // to fetch a part, for as long as it takes memory; nil: there is none

	parts   []*part            // by offset; the reader is before them, or in the first
	buffers [][]byte           // of parts that the reader has passed
	cancel  context.CancelFunc // ends the fetches; nil: there were none since clear
	ctx     context.Context    // theirs
	used    bool
	running sync.WaitGroup

	over    atomic.Bool  // no more are begun
	ranges  atomic.Bool  // the registry is known to have ranges
	arrived atomic.Int64 // bytes, by the transfer and by parts, as long as the reader is watched

	waited time.Duration // for the network, as long as the reader is watched
	since  sample        // when it began to be watched
	begun  sample        // when the first of the parts were
	alone  float64       // how fast the blob came before that, see rate
}

// sample is how much had arrived at a time, and how long the reader had waited.
type sample struct {
	at      time.Time // zero: none was taken
	arrived int64
	waited  time.Duration
}

func (a *ahead) sample(now time.Time) sample { return sample{now, a.arrived.Load(), a.waited} }

// rate is how many bytes came for each second that the reader waited: how fast the network is, however busy the reader was.
func (s sample) rate(since sample) float64 {
	return float64(s.arrived-since.arrived) / (s.waited - since.waited).Seconds()
}

// part is a range of a blob.
type part struct {
	offset   int64
	buf      []byte
	giveBack func()
	began    time.Time
	entered  bool          // by the reader
	news     chan struct{} // holds a token if there is something that the reader has not seen

	mu      sync.Mutex // guards what follows
	arrived int        // bytes of buf
	whole   time.Time  // when all of them had arrived
	err     error      // why no more will come; nil also when all have come
}

func (p *part) end() int64 { return p.offset + int64(len(p.buf)) }

// add tells of bytes that have arrived, and of why no more will.
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

// at returns the part that begins at an offset or has it, nil if there is none.
func (a *ahead) at(offset int64) *part {
	if len(a.parts) > 0 && a.parts[0].offset <= offset {
		return a.parts[0]
	}
	return nil
}

// limit is how much a transfer at an offset may still bring of the size that it is for.
func (a *ahead) limit(offset, size int64) int64 {
	if len(a.parts) > 0 {
		size = a.parts[0].offset
	}
	return size - offset
}

// drop gives up the first part, which the reader has passed or which will never be whole.
func (a *ahead) drop() {
	p := a.parts[0]
	a.parts = a.parts[1:]
	p.mu.Lock()
	whole := p.arrived == len(p.buf)
	p.mu.Unlock()
	if whole { // nobody writes to it any more
		a.buffers = append(a.buffers, p.buf[:cap(p.buf)])
	}
	p.giveBack()
}

// waits tells of a time that the reader has waited for n bytes of its transfer, and reports whether parts are wanted.
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

// judge tells of a time when the first part has been read. No more are begun where the line is what is slow: where the blob comes no
// faster than without parts, or a part crawled.
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

// extend begins as many parts as there is leave for, for as long as ctx lasts. A reader that is at an offset, of a size, goes on by itself for the time of one.
func (a *ahead) extend(ctx context.Context, offset, size int64, fetch func(ctx context.Context, p *part) error) {
	defer func() { a.buffers = nil }() // there is no leave for their memory
	next := offset + a.size
	if n := len(a.parts); n > 0 {
		next = a.parts[n-1].end()
	} else if next+a.size > size {
		return // not worth it
	}
	for ; !a.over.Load() && next < size; next = a.parts[len(a.parts)-1].end() {
		if len(a.parts) > 0 && !a.ranges.Load() {
			return // that is the trial
		}
		giveBack, ok := a.leave()
		if !ok {
			return
		}
		p := &part{offset: next, buf: a.buffer()[:min(a.size, size-next)], giveBack: giveBack, began: time.Now(), news: make(chan struct{}, 1)}
		a.parts, a.used = append(a.parts, p), true
		a.begin(ctx, p, fetch)
	}
}

// begin has a part fetched.
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

// clear ends the fetches, and gives up all parts.
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

// fetchPart fetches a part from a host. It runs beside the blob's reader.
func (b *Blob) fetchPart(ctx context.Context, e *endpoint, p *part) error {
	last := p.end() - 1
	resp, err := e.request(ctx, http.MethodGet, b.path(), http.Header{"Accept": {"*/*"}, "Range": {fmt.Sprintf("bytes=%d-%d", p.offset, last)}})
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
