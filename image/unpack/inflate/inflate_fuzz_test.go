package inflate

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"berth/image/blobindex"
)

// FuzzTarReader: packed data is decompressed in every format. A truncated blob never passes as
// complete. Arbitrary bytes are read to their end or rejected.
func FuzzTarReader(f *testing.F) {
	f.Add([]byte("content of a tar"), uint8(0), 20)
	f.Add(bytes.Repeat([]byte("ab"), 5000), uint8(1), 3)
	f.Add([]byte{0x1f, 0x8b, 8, 0}, uint8(2), 0)
	f.Add(slices.Concat(skippable(4), zstdFrame(f, []byte("content")), make([]byte, 9)), uint8(2), 0)
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xa4, 0xff, 0xff, 0xff, 0xff}, uint8(2), 1)
	f.Fuzz(func(t *testing.T, data []byte, form uint8, cut int) {
		blob := packed(t, data, form)
		kind, unsupported := Detect(blob[:min(len(blob), HeadSize)])
		compressed := kind != blobindex.None || unsupported != nil
		out, rest, err := unpackedTar(t, blob)
		if form%3 < 2 && (err != nil || !bytes.Equal(out, data)) {
			t.Fatalf("%d bytes became %d: %v", len(data), len(out), err)
		}
		if err == nil && rest > 0 {
			t.Fatalf("an end with %d bytes of the blob unread", rest)
		}
		if !compressed && (err != nil || !bytes.Equal(out, blob)) {
			t.Fatalf("what is not compressed is changed: %v", err)
		}
		if form%3 == 2 || len(blob) == 0 {
			return
		}
		part := blob[:int(uint(cut)%uint(len(blob)))]
		if !bytes.HasPrefix(part, blob[:min(len(blob), HeadSize)]) {
			return // too short to have zstd's magic number
		}
		if out, _, err := unpackedTar(t, part); err == nil && !bytes.Equal(out, data) {
			t.Fatalf("a part of %d bytes of %d is taken for %d of %d", len(part), len(blob), len(out), len(data))
		}
	})
}

// packed is data as gzip, zstd, or itself.
func packed(t *testing.T, data []byte, form uint8) []byte {
	t.Helper()
	var out bytes.Buffer
	var w io.WriteCloser
	var err error
	switch form % 3 {
	case 0:
		w = gzip.NewWriter(&out)
	case 1:
		if w, err = zstd.NewWriter(&out, zstd.WithEncoderConcurrency(1)); err != nil {
			t.Fatal(err)
		}
	default:
		return data
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// unpackedTar reads at most a few MB: other tests cover bombs.
func unpackedTar(t *testing.T, blob []byte) (out []byte, rest int, err error) {
	t.Helper()
	from := bytes.NewReader(blob)
	r, err := NewReader(iotest.OneByteReader(from), MaxWindow, nil)
	if err == nil {
		defer r.Close()
		if out, err = io.ReadAll(io.LimitReader(r, 8<<20)); len(out) == 8<<20 {
			t.Skip("a bomb")
		}
	}
	corrupt, unsupported := new(CorruptError), new(UnsupportedError)
	if err != nil && !errors.As(err, &corrupt) && !errors.As(err, &unsupported) {
		t.Fatalf("%v is not said to be the blob's fault", err)
	}
	return out, from.Len(), err
}
