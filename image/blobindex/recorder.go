package blobindex

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
)

// SpanFor returns the least distance between two points in the tar of a blob, in bytes. A point
// takes about 12 KB. So the distance is larger for large layers, which would otherwise fill the
// space for indexes.
func SpanFor(blobSize int64) int64 {
	span := int64(minSpanFor)
	for size := int64(1 << 30); blobSize > size && span < maxSpanFor; size *= 4 {
		span *= 2
	}
	return span
}

// Limits of SpanFor. The image of BenchmarkPullWithIndexes has 628 MB. Its indexes have 1.2 % of
// this size if the distance is 2 MiB, and 0.6 % if it is 4 MiB. A reader of missing bytes waits for
// a whole span.
const (
	minSpanFor = 3 << 20
	maxSpanFor = 12 << 20
)

// Recorder writes the points of a blob while it is decompressed: its compression as one byte, and
// its points. A nil Recorder records nothing. Only Drop may be called concurrently.
type Recorder struct {
	out      *bufio.Writer
	span     int64
	order    PointReader // checks each point
	compress WindowCompressor
	buf      []byte
	dropped  atomic.Bool
	err      error
}

// NewRecorder returns a Recorder to out, with points that are span bytes of the tar apart, or more.
func NewRecorder(out io.Writer, span int64) *Recorder {
	return &Recorder{out: bufio.NewWriterSize(out, 64<<10), span: span}
}

// Drop gives up: the layer can have no index.
func (r *Recorder) Drop() {
	if r != nil {
		r.dropped.Store(true)
	}
}

// Begin records the compression and the first point.
func (r *Recorder) Begin(kind Compression) {
	if r != nil {
		r.err = r.out.WriteByte(byte(kind))
		r.add(Point{Start: true})
	}
}

// Wants reports whether there should be a point at an offset of the tar.
func (r *Recorder) Wants(out int64) bool {
	return r != nil && out-r.order.last.Out >= r.span && r.recording()
}

func (r *Recorder) recording() bool { return r.err == nil && !r.dropped.Load() }

// Start records a point, if it is due: the start of a gzip member or zstd frame, or a place in an
// uncompressed tar.
func (r *Recorder) Start(in, out int64) {
	if r.Wants(out) {
		r.add(Point{In: in, Out: out, Start: true})
	}
}

// Block records the start of a deflate block. It compresses p.Window, which is not compressed.
func (r *Recorder) Block(p Point) {
	if !r.Wants(p.Out) {
		return
	}
	window, err := r.compress.Compress(p.Window)
	if err != nil {
		r.err = fmt.Errorf("compress window: %w", err)
		return
	}
	p.Window = window
	r.add(p)
}

// add writes a point. It gives up if the span before the point is too long for an index.
func (r *Recorder) add(p Point) {
	if r.err == nil {
		r.err = p.check()
	}
	if r.err == nil {
		r.err = r.order.follows(&p)
	}
	if !r.recording() {
		return
	}
	r.buf = AppendPoint(r.buf[:0], &p)
	_, r.err = r.out.Write(r.buf)
	p.Window = nil
	r.order.last, r.order.any = p, true
}

// Finish ends the recording after the end of the blob. in and out are the lengths of blob and tar.
// The error says why there are no points.
func (r *Recorder) Finish(in, out int64) error {
	last := r.order.last
	switch {
	case r.err != nil:
		return r.err
	case r.dropped.Load() || !r.order.any:
		return errDropped
	case tooLong(in-last.In, out-last.Out):
		return damaged("last span has %d bytes of the blob and %d of the tar", in-last.In, out-last.Out)
	}
	return r.out.Flush()
}

var errDropped = errors.New("the layer can have no index")
