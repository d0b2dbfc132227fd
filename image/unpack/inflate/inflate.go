// Package inflate decompresses the tar of a layer's blob.
//
// # Contract
//
// The window given to NewReader limits its memory, whatever the blob contains. Zeros after
// compressed data are padding. Invalid compressed data is a CorruptError. An error of the blob's
// reader takes precedence and is returned unchanged. It uses ISA-L for gzip if available (package
// isal).
package inflate

import (
	"bufio"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"

	"berth/image/blobindex"
)

const (
	// blobBuffer is how much of a blob is buffered in front of the decompressor.
	blobBuffer = 256 << 10
	// MaxWindow is the largest zstd window of a layer, in bytes. It is what `zstd --long` needs.
	MaxWindow = 128 << 20
)

// CorruptError says that a blob cannot be decompressed.
type CorruptError struct{ Err error }

func (e *CorruptError) Error() string { return "decompress: " + e.Err.Error() }
func (e *CorruptError) Unwrap() error { return e.Err }

// ErrWindow is wrapped by the error about a zstd blob whose window exceeds the argument of
// NewReader, but not MaxWindow.
var ErrWindow = errors.New("decompress: the window is larger than allowed for now")

// Reader is the tar in a layer's blob. It returns io.EOF only after the blob's reader has returned
// io.EOF, which it does after its own checks. Not safe for concurrent use.
type Reader struct {
	source *source
	blob   *bufio.Reader // of source
	tar    io.Reader
	close  func()
	window int64
	points *blobindex.Recorder
	out    int64 // bytes returned
}

// source counts the bytes of a blob and remembers how it failed.
type source struct {
	io.Reader
	n   int64
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	s.n += int64(n)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// NewReader reads a blob in the compression that Detect finds: gzip, zstd or none. The caller
// closes the reader, which does not close the blob. window limits the window of a zstd blob. If
// points is not nil, the reader records in it where decompression can begin.
func NewReader(blob io.Reader, window int64, points *blobindex.Recorder) (*Reader, error) {
	t := &Reader{source: &source{Reader: blob}, close: func() {}, window: min(window, MaxWindow), points: points}
	t.blob = bufio.NewReaderSize(t.source, blobBuffer)
	head, err := t.blob.Peek(HeadSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	kind, err := Detect(head)
	if err != nil {
		return nil, err
	}
	switch kind {
	case blobindex.Gzip:
		z, err := newGunzip(t.blob, points)
		if err != nil {
			return nil, t.failure(err)
		}
		t.tar, t.close = z, func() { _ = z.Close() } // the blob was read to its end, or abandoned
	case blobindex.Zstd:
		points.Begin(blobindex.Zstd)
		z, err := openZstd(&frames{from: t.blob, started: t.started}, t.window)
		if err != nil {
			return nil, t.failure(err)
		}
		t.tar, t.close = z, z.Close
	default:
		points.Begin(blobindex.None)
		t.tar = &plain{t.blob, t.started, 0}
	}
	return t, nil
}

func openZstd(from io.Reader, window int64) (*zstd.Decoder, error) {
	return zstd.NewReader(from, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(uint64(window)))
}

// started records where the next bytes of the tar begin in the blob.
func (r *Reader) started(in int64) { r.points.Start(in, r.out) }

// plain is a tar that is not compressed. Every read starts a part.
type plain struct {
	from    io.Reader
	started func(in int64)
	n       int64
}

func (p *plain) Read(b []byte) (int, error) {
	p.started(p.n)
	n, err := p.from.Read(b)
	p.n += int64(n)
	return n, err
}

// EndPoints completes the record of points after the last Read has returned io.EOF. The error says
// why there are no points.
func (r *Reader) EndPoints() error { return r.points.Finish(r.source.n, r.out) }

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (int, error) {
	n, err := r.tar.Read(p)
	r.out += int64(n)
	if err == io.EOF { //nolint:errorlint // a wrapped EOF is an error
		// Read the rest of the blob, because the blob's reader verifies the digest at its end.
		if _, err := io.Copy(io.Discard, r.blob); err != nil {
			return n, r.failure(err)
		}
		return n, io.EOF
	}
	if err != nil {
		err = r.failure(err)
	}
	return n, err
}

// failure returns the error of the blob's reader. If it has none, the blob is corrupt.
func (r *Reader) failure(err error) error {
	if r.source.err != nil {
		return r.source.err
	}
	if errors.Is(err, zstd.ErrWindowSizeExceeded) && r.window < MaxWindow {
		return ErrWindow
	}
	return &CorruptError{err}
}

// Close frees the decompressor.
func (r *Reader) Close() error {
	r.close()
	return nil
}
