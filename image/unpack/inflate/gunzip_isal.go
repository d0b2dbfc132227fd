//go:build isal && cgo

package inflate

import (
	"bufio"
	"io"

	"berth/image/unpack/isal"
)

// newGunzip returns a reader of the gzip in blob.
func newGunzip(blob *bufio.Reader) (io.ReadCloser, error) { return isal.NewReader(blob) }
