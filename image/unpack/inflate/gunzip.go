package inflate

import (
	"bufio"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"

	"berth/image/unpack/isal"
)

// unfit records that ISA-L could not decompress a gzip.
var unfit atomic.Bool

// Gunzip returns the name of gzip's decompressor: "ISA-L" or "Go". The first gzip shows whether a
// loaded ISA-L works; before that its name is returned.
func Gunzip() string {
	if isal.Loaded() && !unfit.Load() {
		return "ISA-L"
	}
	return "Go"
}

// newGunzip returns a reader of the gzip in blob.
func newGunzip(blob *bufio.Reader) (io.ReadCloser, error) {
	if isal.Works() {
		return isal.NewReader(blob)
	}
	unfit.Store(true)
	return gzip.NewReader(blob)
}
