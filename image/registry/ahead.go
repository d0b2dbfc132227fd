package registry

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"berth/internal/errdefs"
)

const (
	// partSize is how much of a blob one range request is for, and the memory that it takes.
	partSize = 4 << 20
	// watchTime is how long a reader is watched before parts are fetched for it: most of this time it has waited for the network.
	watchTime = 200 * time.Millisecond
)

// ahead fetches parts of a blob that its reader has not come to, each by a connection of its own, while the reader waits for the
// network: many registries give a connection so much and no more. Whatever goes wrong with a part, the reader fetches that piece of the
// blob as if there were no parts, and no more of them are begun. It is the reader's: not safe for concurrent use.
type ahead struct {
	size  int64 // of a part
	watch time.Duration
	spare func() (giveBack func(), ok bool) // leave to fetch a part, for as long as it takes memory

	parts   []*part  // by offset; the reader is before them, or in the first
	buffers [][]byte // of parts that the reader has passed
	over    bool     // no more are begun
	used    bool
	running sync.WaitGroup

	since  time.Time     // when the reader began to be watched; zero: it is not
	waited time.Duration // since then, for the network
}

// part is a range of a blob.
type part struct {
	offset   int64
	buf      []byte
	giveBack func()
	news     chan struct{} // holds a token if there is something that the reader has not seen

	mu      sync.Mutex // guards what follows
	arrived int        // bytes of buf
	err     error      // why no more will come; nil also when all have come
}

func (p *part) end() int64 { return p.offset + int64(len(p.buf)) }

// add tells of bytes that have arrived, and of why no more will.
func (p *part) add(n int, err error) {
	p.mu.Lock()
	p.arrived += n
	p.err = err
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
	} else {
		a.over = true
	}
	p.giveBack()
}

// waits tells of a time that the reader has waited for bytes, and reports whether parts are wanted.
func (a *ahead) waits(began time.Time) bool {
	if a.over || a.spare == nil {
		return false
	}
	now := time.Now()
	if a.since.IsZero() {
		a.since = began
	}
	a.waited += now.Sub(began)
	watched := now.Sub(a.since)
	if watched < a.watch {
		return false
	}
	wanted := a.waited > watched/2
	a.since, a.waited = now, 0
	return wanted
}

// extend begins as many parts as there is leave for. A reader that is at an offset, of a size, goes on by itself for the time of one.
func (a *ahead) extend(offset, size int64, fetch func(p *part) error) {
	defer func() { a.buffers = nil }() // there is no leave for their memory
	next := offset + a.size
	if n := len(a.parts); n > 0 {
		next = a.parts[n-1].end()
	} else if next+a.size > size {
		return // not worth it
	}
	for ; !a.over && next < size; next = a.parts[len(a.parts)-1].end() {
		giveBack, ok := a.spare()
		if !ok {
			return
		}
		p := &part{offset: next, buf: a.buffer()[:min(a.size, size-next)], giveBack: giveBack, news: make(chan struct{}, 1)}
		a.parts, a.used = append(a.parts, p), true
		a.running.Go(func() {
			if err := fetch(p); err != nil {
				p.add(0, err)
			}
		})
	}
}

func (a *ahead) buffer() []byte {
	if n := len(a.buffers); n > 0 {
		b := a.buffers[n-1]
		a.buffers = a.buffers[:n-1]
		return b
	}
	return make([]byte, a.size)
}

// clear gives up all parts. Their fetches are to have been cancelled.
func (a *ahead) clear() {
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
	for at := 0; at < len(p.buf); {
		n, err := resp.Body.Read(p.buf[at:])
		at += n
		if at == len(p.buf) {
			err = nil
		} else if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		p.add(n, err)
		if err != nil {
			return err
		}
	}
	return nil
}
