//go:build !isal || !cgo

package isal

import (
	"bufio"
	"errors"
	"io"
)

// Loaded tells whether the library is there.
func Loaded() bool { return false }

// Works tells whether it can be used.
func Works() bool { return false }

// NewReader fails.
func NewReader(*bufio.Reader) (io.ReadCloser, error) { return nil, errors.ErrUnsupported }
