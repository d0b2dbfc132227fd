package inflate

import (
	"bufio"
	"io"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"

	"berth/image/blobindex"
	"berth/image/unpack/inflate/padding"
	"berth/image/unpack/isal"
)

// unfit records that ISA-L could not decompress a gzip.
var unfit atomic.Bool

// Gunzip returns the name of gzip's decompressor: "ISA-L" or "Go". Whether a loaded ISA-L works is
// known after the first gzip. Before that, it returns "ISA-L".
func Gunzip() string {
	if isal.Loaded() && !unfit.Load() {
		return "ISA-L"
	}
	return "Go"
}

// newGunzip returns a reader of the gzip in blob, which records points. Go's decompressors do not
// tell where a block begins, so they record no points.
func newGunzip(blob *bufio.Reader, points *blobindex.Recorder) (io.ReadCloser, error) {
	if isal.Works() {
		return isal.NewReader(blob, points)
	}
	unfit.Store(true)
	points.Drop()
	return gunzipByGo(blob)
}

func gunzipByGo(blob *bufio.Reader) (*memberReader, error) {
	z, err := gzip.NewReader(blob)
	if err != nil {
		return nil, err
	}
	z.Multistream(false)
	return &memberReader{z, blob}, nil
}

// memberReader reads the members of a gzip and the padding after them.
type memberReader struct {
	*gzip.Reader // of the current member
	blob         *bufio.Reader
}

// Read implements io.Reader.
func (m *memberReader) Read(p []byte) (int, error) {
	n, err := m.Reader.Read(p)
	if err != io.EOF { //nolint:errorlint // io.Reader
		return n, err
	}
	if err := padding.Skip(m.blob); err != nil {
		return n, err
	}
	if err := m.Reset(m.blob); err != nil {
		return n, err
	}
	m.Multistream(false)
	return n, nil
}
