package inflate

import (
	"bufio"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"

	"berth/image/lazy/index"
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

// newGunzip returns a reader of the gzip in blob, which records points. Go's decompressors do not
// tell where a block begins, so that they record none.
func newGunzip(blob *bufio.Reader, points *index.Recorder) (io.ReadCloser, error) {
	if isal.Works() {
		return isal.NewReader(blob, points)
	}
	unfit.Store(true)
	points.Drop()
	return gzip.NewReader(blob)
}
