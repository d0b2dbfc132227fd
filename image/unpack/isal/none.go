//go:build !isal || !cgo

package isal

import (
	"bufio"
	"errors"
	"io"

	"berth/image/lazy/index"
)

// Loaded reports whether the library was loaded.
func Loaded() bool { return false }

// Works reports whether the library can be used.
func Works() bool { return false }

// NewReader fails.
func NewReader(*bufio.Reader, *index.Recorder) (io.ReadCloser, error) {
	return nil, errors.ErrUnsupported
}

// NewReaderAt fails.
func NewReaderAt(*bufio.Reader, *index.Point, []byte) (io.ReadCloser, error) {
	return nil, errors.ErrUnsupported
}
