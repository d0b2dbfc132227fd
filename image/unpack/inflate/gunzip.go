package inflate

import (
	"bufio"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"

	"berth/image/unpack/isal"
)

// unfit: ISA-L was to read a gzip and can't.
var unfit atomic.Bool

// Gunzip names what reads gzip: "ISA-L" or "Go". Whether a library that is there can be used shows when it is to read the first.
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
