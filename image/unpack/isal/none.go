//go:build !isal || !cgo

package isal

import (
	"bufio"
	"errors"
	"io"

	"berth/image/blobindex"
)

// Loaded reports whether the library was loaded.
func Loaded() bool { return false }

// Works reports whether the library can be used.
func Works() bool { return false }

// NewReader fails.
func NewReader(*bufio.Reader, *blobindex.Recorder) (io.ReadCloser, error) {
	return nil, errors.ErrUnsupported
}

// NewReaderAt fails.
func NewReaderAt(*bufio.Reader, *blobindex.Point, []byte) (io.ReadCloser, error) {
	return nil, errors.ErrUnsupported
}
