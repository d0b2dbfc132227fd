//go:build !isal || !cgo

package inflate

import (
	"bufio"
	"io"

	"github.com/klauspost/compress/gzip"
)

// newGunzip returns a reader of the gzip in blob.
func newGunzip(blob *bufio.Reader) (io.ReadCloser, error) { return gzip.NewReader(blob) }
