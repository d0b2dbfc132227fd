// Package padding finds the end of compressed data that is padded with zeros. bsdtar and tape
// drives write whole blocks.
//
// # Contract
//
// Zeros count as padding only up to the end of the blob, in any number. gzip(1) does the same.
// The package is separate from inflate because both inflate and isal need it.
package padding

import (
	"bufio"
	"errors"
)

// errAfter is returned for data between zeros and the end.
var errAfter = errors.New("other bytes follow zeros after the compressed data")

// Skip is called at the end of a gzip member or zstd frame. It returns nil if another member or
// frame follows. After the last one and its padding it returns io.EOF. Other errors come from from,
// or say that other data follows the padding.
func Skip(from *bufio.Reader) error {
	for padded := false; ; padded = true {
		next, err := from.Peek(1)
		if err != nil {
			return err
		}
		if next[0] != 0 {
			if padded {
				return errAfter
			}
			return nil
		}
		if err := discardZeros(from); err != nil {
			return err
		}
	}
}

// discardZeros discards the zeros at the start of the buffer.
func discardZeros(from *bufio.Reader) error {
	buffered, err := from.Peek(from.Buffered())
	if err != nil {
		return err
	}
	n := 0
	for n < len(buffered) && buffered[n] == 0 {
		n++
	}
	_, err = from.Discard(n)
	return err
}
