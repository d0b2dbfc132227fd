package fill

import (
	"context"
	"errors"
	"fmt"
	"io"

	"berth/image/blobindex"
	"berth/internal/errdefs"
	"berth/internal/task"
)

// gridReader reads the verified spans of one request, in order. It keeps one span in memory.
type gridReader struct {
	x      *blobindex.Index
	body   io.ReadCloser // nil: the request has no bytes
	offset int64         // in the blob, of buf
	buf    []byte        // verified
}

// open sends the request for a job.
func (g *gridReader) open(ctx context.Context, from Source, j job) (err error) {
	var size int64
	if g.offset, size = g.x.GridRange(j.first, j.last); size == 0 {
		return nil
	}
	g.body, err = from.Range(ctx, g.offset, size)
	return err
}

func (g *gridReader) close() {
	if g.body != nil {
		g.body.Close() // all that is needed was read and verified
	}
}

// span returns a span and its bytes of the blob, which are valid until the next call.
func (g *gridReader) span(i int) (s blobindex.Span, raw []byte, err error) {
	s = g.x.Span(i)
	offset, size := g.x.GridRange(i, i)
	drop := min(max(offset-g.offset, 0), int64(len(g.buf)))
	g.buf = g.buf[:copy(g.buf, g.buf[drop:])]
	g.offset += drop
	if more := offset + size - g.offset - int64(len(g.buf)); more > 0 {
		if err := g.read(more); err != nil {
			return s, nil, err
		}
	}
	if g.x.Sealed() {
		s.Point, raw, err = g.x.Opened(i, g.buf[offset-g.offset:][:size])
		g.rejectIf(err)
		return s, raw, err
	}
	return s, g.buf[s.In-g.offset:][:s.InSize], nil
}

// read reads and verifies the next n bytes.
func (g *gridReader) read(n int64) error {
	have := len(g.buf)
	if need := have + int(n); need > cap(g.buf) {
		buf := make([]byte, have, need)
		copy(buf, g.buf)
		g.buf = buf
	}
	next := g.buf[have : have+int(n)]
	if _, err := io.ReadFull(g.body, next); err != nil {
		return errdefs.Unavailable("read blob: %w", err)
	}
	if err := g.x.Verify(g.offset+int64(have), next); err != nil {
		g.rejectIf(err)
		return err
	}
	g.buf = g.buf[:have+int(n)]
	return nil
}

// rejectIf calls Reject if an error means that the source has sent wrong bytes.
func (g *gridReader) rejectIf(err error) {
	if r, ok := g.body.(Rejecter); ok && errors.Is(err, blobindex.ErrMismatch) {
		r.Reject()
	}
}

// inflater starts an Inflater when a layer needs one, and serializes its calls.
type inflater struct {
	make func() (Inflater, error)
	lock task.Lock // guards inf
	inf  Inflater
}

func (i *inflater) acquire(ctx context.Context) error {
	select {
	case i.lock <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the decompression of another span: %w", context.Cause(ctx))
	}
}

// span decompresses one span. After an error the next call starts another Inflater.
func (i *inflater) span(ctx context.Context, p blobindex.Point, in []byte, out int64) ([]byte, error) {
	if err := i.acquire(ctx); err != nil {
		return nil, err
	}
	defer func() { <-i.lock }()
	if i.inf == nil {
		inf, err := i.make()
		if err != nil {
			return nil, fmt.Errorf("start decompression: %w", err)
		}
		i.inf = inf
	}
	tar, err := i.inf.Span(ctx, p, in, out)
	if err != nil {
		err = errors.Join(fmt.Errorf("decompress: %w", err), i.inf.Close())
		i.inf = nil
	}
	return tar, err
}

// close ends the Inflater, if there is one.
func (i *inflater) close(ctx context.Context) error {
	if err := i.acquire(ctx); err != nil {
		return err
	}
	defer func() { <-i.lock }()
	if i.inf == nil {
		return nil
	}
	err := i.inf.Close()
	i.inf = nil
	return err
}
