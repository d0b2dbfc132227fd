//go:build isal && cgo

package isal

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	klauspost "github.com/klauspost/compress/gzip"

	"berth/image/unpack/inflate/inflatetest"
	"berth/image/unpack/inflate/padding"
)

// most limits how much of a fuzzer's input is decompressed.
const most = 256 << 10

// inflateBy reads a gzip to its end, by portions of size bytes.
func inflateBy(r io.Reader, size int) ([]byte, error) {
	var out bytes.Buffer
	buf := make([]byte, size)
	for out.Len() < most {
		n, err := r.Read(buf)
		out.Write(buf[:n])
		if err == io.EOF {
			return out.Bytes(), nil
		}
		if err != nil {
			return out.Bytes(), err
		}
	}
	return out.Bytes(), nil
}

// need skips a test where there is no library.
func need(t testing.TB) {
	t.Helper()
	if !Works() {
		t.Skip("libisal.so.2 cannot be used")
	}
}

func byISAL(blob io.Reader, inBuffer, outBuffer int) ([]byte, error) {
	r, err := NewReader(bufio.NewReaderSize(blob, inBuffer), nil)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return inflateBy(r, outBuffer)
}

func byGo(blob []byte) ([]byte, error) {
	in := bufio.NewReader(bytes.NewReader(blob))
	r, err := gzip.NewReader(in)
	if err != nil {
		return nil, err
	}
	for out := []byte(nil); ; {
		r.Multistream(false)
		more, err := inflateBy(r, 32<<10)
		if out = append(out, more...); err != nil || len(out) >= most {
			return out, err
		}
		if err := padding.Skip(in); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return out, err
		}
		if err := r.Reset(in); err != nil {
			return out, err
		}
	}
}

// FuzzAgainstGo: the library and Go's package decompress to the same bytes and reject the same
// input, however input and output are divided.
func FuzzAgainstGo(f *testing.F) {
	need(f)
	text := []byte(strings.Repeat("some text that repeats itself, some text ", 400))
	for level := gzip.HuffmanOnly; level <= gzip.BestCompression; level++ {
		f.Add(pack(f, text, level), uint16(16), uint16(100))
		f.Add(append(pack(f, text[:100], level), pack(f, nil, level)...), uint16(4096), uint16(1))
	}
	f.Add([]byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0, 0x63, 0x00, 0x06, 0x00, 0, 0, 0, 0, 0, 0, 0, 0}, uint16(16), uint16(7))
	f.Add(append(pack(f, text, 6), make([]byte, 700)...), uint16(16), uint16(100))
	f.Fuzz(func(t *testing.T, blob []byte, inBuffer, outBuffer uint16) {
		want, wantErr := byGo(blob)
		in, out := 16+int(inBuffer), 1+int(outBuffer) // bufio's least is 16
		got, err := byISAL(bytes.NewReader(blob), in, out)
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("ISA-L: %d bytes, %v; Go: %d bytes, %v", len(got), err, len(want), wantErr)
		}
		if n := min(len(got), len(want)); !bytes.Equal(got[:n], want[:n]) || err == nil && len(got) != len(want) && n < most {
			t.Fatalf("ISA-L has %d bytes, Go %d, and they are not the same", len(got), len(want))
		}
		again, againErr := byISAL(iotest.OneByteReader(bytes.NewReader(blob)), 16, 1+out/2)
		if n := min(len(got), len(again)); (err == nil) != (againErr == nil) || !bytes.Equal(got[:n], again[:n]) {
			t.Fatalf("byte by byte %d bytes, %v; else %d bytes, %v", len(again), againErr, len(got), err)
		}
	})
}

func pack(t testing.TB, data []byte, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Write(data)
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// BenchmarkGunzip compares the library with Go's packages. The rate is that of the output.
func BenchmarkGunzip(b *testing.B) {
	need(b)
	data := inflatetest.Sample(32 << 20)
	blob := pack(b, data, 6)
	for name, open := range map[string]func(io.Reader) (io.ReadCloser, error){
		"isal":      func(r io.Reader) (io.ReadCloser, error) { return NewReader(bufio.NewReaderSize(r, 256<<10), nil) },
		"klauspost": func(r io.Reader) (io.ReadCloser, error) { return klauspost.NewReader(r) },
		"std":       func(r io.Reader) (io.ReadCloser, error) { return gzip.NewReader(r) },
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			b.ReportMetric(float64(len(data))/float64(len(blob)), "ratio")
			buf := make([]byte, 256<<10)
			for b.Loop() {
				r, err := open(bytes.NewReader(blob))
				if err != nil {
					b.Fatal(err)
				}
				n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{r}, buf)
				if err := errors.Join(err, r.Close()); err != nil || n != int64(len(data)) {
					b.Fatalf("%d bytes, %v", n, err)
				}
			}
		})
	}
}
