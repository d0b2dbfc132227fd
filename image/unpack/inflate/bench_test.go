package inflate

import (
	"bytes"
	"crypto/sha256"
	"io"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"berth/image/unpack/inflate/inflatetest"
)

// BenchmarkReader decompresses the formats of layers and hashes the result with sha256. The rate is
// that of the output. With the tag isal, gzip is ISA-L's, otherwise klauspost's. BenchmarkGunzip in
// package isal compares them.
func BenchmarkReader(b *testing.B) {
	data := inflatetest.Sample(32 << 20)
	for name, blob := range map[string][]byte{"gzip": compressed(b, data, newGzip), "zstd": compressed(b, data, newZstd), "plain": data} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			b.ReportMetric(float64(len(data))/float64(len(blob)), "ratio")
			buf := make([]byte, 256<<10)
			for b.Loop() {
				r, err := NewReader(bytes.NewReader(blob), MaxWindow)
				if err != nil {
					b.Fatal(err)
				}
				n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, buf)
				if err != nil || n != int64(len(data)) {
					b.Fatalf("%d bytes, %v", n, err)
				}
				r.Close()
			}
		})
	}
	b.Run("sha256", func(b *testing.B) {
		b.SetBytes(int64(len(data)))
		for b.Loop() {
			sha256.Sum256(data)
		}
	})
}

func newGzip(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriterLevel(w, 6) }
func newZstd(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) }

func compressed(b *testing.B, data []byte, open func(io.Writer) (io.WriteCloser, error)) []byte {
	b.Helper()
	var out bytes.Buffer
	w, err := open(&out)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		b.Fatal(err)
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	return out.Bytes()
}
