package inflate

import (
	"bufio"
	"io"

	"github.com/klauspost/compress/gzip"

	"berth/image/unpack/isal"
)

// Gunzip names what reads gzip: "ISA-L" or "Go".
func Gunzip() string {
	if isal.Loaded() {
		return "ISA-L"
	}
	return "Go"
}

// newGunzip returns a reader of the gzip in blob.
func newGunzip(blob *bufio.Reader) (io.ReadCloser, error) {
	if isal.Loaded() {
		return isal.NewReader(blob)
	}
	return gzip.NewReader(blob)
}
