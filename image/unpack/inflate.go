package unpack

import (
	"bufio"
	"bytes"
	"io"

	"github.com/klauspost/compress/zstd"
)

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

const (
	// blobBuffer is how much of a blob is buffered in front of the decompressor.
	blobBuffer = 256 << 10
	// maxZstdWindow is the memory a zstd layer may ask for: what `zstd --long` needs.
	maxZstdWindow = 128 << 20
)

// tarReader is the tar in a layer's blob. It returns io.EOF only after the blob
// has been read to its own verified end, and the blob's error in preference to
// what the decompressor makes of it.
type tarReader struct {
	source *source
	blob   *bufio.Reader // of source
	tar    io.Reader
	close  func()
}

// source remembers how a blob failed.
type source struct {
	io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// newTarReader decompresses a blob as its first bytes demand: gzip, zstd or not
// at all. Media types are not asked; they are known to be wrong in places. The
// caller closes the reader, which does not close the blob.
func newTarReader(blob io.Reader) (*tarReader, error) {
	t := &tarReader{source: &source{Reader: blob}, close: func() {}}
	t.blob = bufio.NewReaderSize(t.source, blobBuffer)
	magic, err := t.blob.Peek(len(zstdMagic))
	if err != nil && err != io.EOF {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(magic, gzipMagic):
		z, err := newGunzip(t.blob)
		if err != nil {
			return nil, t.failure(err)
		}
		t.tar, t.close = z, func() { _ = z.Close() } // it was read to its end, or given up
	case bytes.HasPrefix(magic, zstdMagic):
		z, err := zstd.NewReader(t.blob, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxZstdWindow))
		if err != nil {
			return nil, t.failure(err)
		}
		t.tar, t.close = z, z.Close
	default:
		t.tar = t.blob
	}
	return t, nil
}

// Read implements io.Reader.
func (t *tarReader) Read(p []byte) (int, error) {
	n, err := t.tar.Read(p)
	if err == io.EOF {
		// What follows the compressed data is read for the blob's verdict.
		if _, err := io.Copy(io.Discard, t.blob); err != nil {
			return n, t.failure(err)
		}
		return n, io.EOF
	}
	if err != nil {
		err = t.failure(err)
	}
	return n, err
}

// failure returns the blob's error if it has one, else gives err a code.
func (t *tarReader) failure(err error) error {
	if t.source.err != nil {
		return t.source.err
	}
	return corrupt("decompress: %w", err)
}

// Close frees the decompressor.
func (t *tarReader) Close() error {
	t.close()
	return nil
}
