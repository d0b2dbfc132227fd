package unpack

import (
	"context"
	"hash"
	"io"
	"sync"
)

const (
	chunkSize = 256 << 10
	chunks    = 4 // one that is read, one that is filled, and two for differences in speed
)

// chunkPool holds the buffers of streams that have ended.
var chunkPool = sync.Pool{New: func() any { return new([chunkSize]byte) }}

// stream reads a tar ahead of the driver that unpacks it. Its goroutine decompresses and hashes
// while the driver creates files. On two cores that is almost twice as fast for a single layer.
type stream struct {
	full chan chunk
	free chan *[chunkSize]byte
	quit chan struct{}
	cur  chunk  // the chunk that is being read
	rest []byte // what of it is still to be read

	// Only the goroutine uses these fields until done is closed.
	src   io.Reader
	ctx   context.Context
	hash  hash.Hash
	limit int64
	tell  func(n int)
	n     int64
	done  chan struct{}
}

type chunk struct {
	buf *[chunkSize]byte
	n   int
	err error // the error after n bytes; it is not nil in the last chunk
}

func newStream(ctx context.Context, src io.Reader, hash hash.Hash, limit int64, tell func(n int)) *stream {
	s := &stream{
		full: make(chan chunk, chunks), free: make(chan *[chunkSize]byte, chunks),
		quit: make(chan struct{}), done: make(chan struct{}),
		src: src, ctx: ctx, hash: hash, limit: limit, tell: tell,
	}
	for range chunks {
		s.free <- chunkPool.Get().(*[chunkSize]byte)
	}
	go s.run()
	return s
}

// run fills chunks until the source ends, with or without an error.
func (s *stream) run() {
	defer close(s.done)
	for {
		select {
		case buf := <-s.free:
			c := s.fill(buf)
			s.full <- c // never waits, because there is room for all chunks
			if c.err != nil {
				return
			}
		case <-s.quit:
			return
		}
	}
}

func (s *stream) fill(buf *[chunkSize]byte) chunk {
	if s.ctx.Err() != nil {
		return chunk{buf, 0, context.Cause(s.ctx)}
	}
	n, err := 0, error(nil)
	for n < len(buf) && err == nil { // not io.ReadFull, which returns the same error for two different ends of the source
		var m int
		m, err = s.src.Read(buf[n:])
		n += m
		s.tell(m)
	}
	s.hash.Write(buf[:n])
	if s.n += int64(n); s.n > s.limit {
		err = exceeds("it is longer than the %d bytes allowed", s.limit)
	}
	return chunk{buf, n, err}
}

// Read implements io.Reader. It returns the source's errors.
func (s *stream) Read(p []byte) (int, error) {
	for len(s.rest) == 0 {
		if s.cur.err != nil {
			return 0, s.cur.err
		}
		if s.cur.buf != nil {
			s.free <- s.cur.buf
		}
		s.cur = <-s.full
		s.rest = s.cur.buf[:s.cur.n]
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

// finish reads the rest of the source and returns its length and hash.
func (s *stream) finish() (int64, []byte, error) {
	if _, err := io.Copy(io.Discard, s); err != nil {
		return 0, nil, err
	}
	<-s.done
	return s.n, s.hash.Sum(nil), nil
}

// close ends the goroutine and waits for it.
func (s *stream) close() {
	close(s.quit)
	<-s.done
	if s.cur.buf != nil {
		chunkPool.Put(s.cur.buf)
	}
	for range len(s.full) {
		chunkPool.Put((<-s.full).buf)
	}
	for range len(s.free) {
		chunkPool.Put(<-s.free)
	}
}
