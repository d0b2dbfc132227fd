package inflate

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"berth/image/blobindex"
	"berth/image/unpack/inflate/inflatetest"
)

// BenchmarkReader decompresses the formats of layers and hashes the result with sha256. The rate is
// that of the output. With the tag isal, gzip is ISA-L's, otherwise klauspost's. BenchmarkGunzip in
// package isal compares them. BenchmarkPoints has the cost of points.
func BenchmarkReader(b *testing.B) {
	data := inflatetest.Sample(32 << 20)
	for name, blob := range map[string][]byte{"gzip": compressed(b, data, newGzip), "zstd": compressed(b, data, newZstd), "plain": data} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			b.ReportMetric(float64(len(data))/float64(len(blob)), "ratio")
			buf := make([]byte, 256<<10)
			for b.Loop() {
				r, err := NewReader(bytes.NewReader(blob), MaxWindow, nil)
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

// BenchmarkPoints decompresses a gzip with points and without. written is the size of the points,
// in thousandths of the tar; cpu-ms/op is not as noisy as the time.
func BenchmarkPoints(b *testing.B) {
	needISAL(b)
	data := inflatetest.Sample(64 << 20)
	blob := compressed(b, data, newGzip)
	for _, span := range []int64{0, 1 << 20, 2 << 20, 4 << 20} {
		b.Run(fmt.Sprintf("%dMiB", span>>20), func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			buf := make([]byte, 256<<10)
			var written bytes.Buffer
			before := cpuTime(b)
			for b.Loop() {
				var points *blobindex.Recorder
				if written.Reset(); span > 0 {
					points = blobindex.NewRecorder(&written, span)
				}
				r, err := NewReader(bytes.NewReader(blob), MaxWindow, points)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, buf); err != nil {
					b.Fatal(err)
				}
				if span > 0 && r.EndPoints() != nil {
					b.Fatal("no points")
				}
				r.Close()
			}
			b.ReportMetric(float64(written.Len())/float64(len(data))*1000, "written")
			b.ReportMetric(float64(cpuTime(b)-before)/1e6/float64(b.N), "cpu-ms/op")
		})
	}
}

// cpuTime returns the user and system time of the process in nanoseconds.
func cpuTime(b *testing.B) int64 {
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return used.Utime.Nano() + used.Stime.Nano()
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
