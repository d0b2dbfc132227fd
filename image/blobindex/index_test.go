package blobindex

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/opencontainers/go-digest"
)

// testSpan is the distance of points in these tests.
const testSpan = 2 << 20

// sample returns an index of a plain blob, and the blob.
func sample(t testing.TB, size int) (*Index, []byte) {
	t.Helper()
	blob := make([]byte, size)
	source := rand.NewChaCha8([32]byte{1})
	_, _ = source.Read(blob)
	h := NewHash()
	for rest := blob; len(rest) > 0; {
		n := min(len(rest), 100_003) // never on the grid
		h.Write(rest[:n])
		rest = rest[n:]
	}
	states, err := h.States(int64(size))
	if err != nil {
		t.Fatal(err)
	}
	x := &Index{
		Blob: digest.NewDigest(digest.SHA256, h), BlobSize: int64(size),
		DiffID: digest.FromBytes(blob), TarSize: int64(size), Kind: None, States: states,
		TreeDigest: digest.FromString("tree"), RecordDigest: digest.FromString("record"), DataSize: 4096,
		Summary: Summary{Bytes: 8192, Inodes: 3, Opaque: true, Whiteouts: 2},
	}
	for out := int64(0); out < int64(size); out += testSpan {
		x.Points = append(x.Points, Point{In: out, Out: out, Start: true})
	}
	return x, blob
}

// gzipSample returns an index with points inside a gzip member. Nothing can be decompressed with
// it.
func gzipSample(t testing.TB) *Index {
	t.Helper()
	x, _ := sample(t, 5*Grid+1)
	var c WindowCompressor
	window, err := c.Compress(bytes.Repeat([]byte("window"), WindowSize/6))
	if err != nil {
		t.Fatal(err)
	}
	x.Kind, x.TarSize = Gzip, 5*testSpan
	x.Points = []Point{
		{Start: true},
		{In: Grid + 10, Out: testSpan + 7, Bits: 3, Byte: 0xa0, Window: window},
		{In: 3 * Grid, Out: 3 * testSpan, Window: window},
		{In: 4 * Grid, Out: 4 * testSpan, Start: true},
	}
	return x
}

func encode(t testing.TB, x *Index) []byte {
	t.Helper()
	b, err := x.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEncodingIsReversible(t *testing.T) {
	plain, _ := sample(t, 3*testSpan+5)
	for name, x := range map[string]*Index{"plain": plain, "gzip": gzipSample(t), "chunks": chunksSample()} {
		t.Run(name, func(t *testing.T) {
			got, err := Decode(encode(t, x))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, x) {
				t.Fatalf("got %+v, want %+v", got, x)
			}
		})
	}
}

func TestFilesAreVerified(t *testing.T) {
	x, _ := sample(t, 1)
	for _, wrong := range [][2]string{{"tree", ""}, {"", "record"}, {"tree", "tree"}, {"record", "record"}} {
		if err := x.SetFiles([]byte(wrong[0]), []byte(wrong[1])); !errors.Is(err, ErrDamaged) || x.Tree != nil {
			t.Errorf("%v: %v", wrong, err)
		}
	}
	if err := x.SetFiles([]byte("tree"), []byte("record")); err != nil || string(x.Tree) != "tree" || string(x.Record) != "record" {
		t.Error(err)
	}
}

func TestInconsistentIndexIsRejected(t *testing.T) {
	cases := map[string]func(*Index){
		"SHA-512":             func(x *Index) { x.Blob = digest.SHA512.FromString("") },
		"no tree":             func(x *Index) { x.TreeDigest = "" },
		"record by SHA-512":   func(x *Index) { x.RecordDigest = digest.SHA512.FromString("") },
		"no diffID":           func(x *Index) { x.DiffID = "" },
		"empty blob":          func(x *Index) { x.BlobSize, x.States = 0, nil },
		"empty tar":           func(x *Index) { x.TarSize = 0 },
		"unknown compression": func(x *Index) { x.Kind = 3 },
		"negative data":       func(x *Index) { x.DataSize = -1 },
		"state too few":       func(x *Index) { x.States = x.States[1:] },
		"state too many":      func(x *Index) { x.States = append(x.States, State{}) },
		"no points":           func(x *Index) { x.Points = nil },
		"first point late":    func(x *Index) { x.Points = x.Points[1:] },
		"first point inside":  func(x *Index) { x.Points[0].Start = false },
		"same place":          func(x *Index) { x.Points[2] = x.Points[1] },
		"back in the tar":     func(x *Index) { x.Points[2].Out = 1 },
		"back in the blob":    func(x *Index) { x.Points[2].In = 1 },
		"negative":            func(x *Index) { x.Points[0].In = -1 },
		"eight bits":          func(x *Index) { x.Points[1].Bits = 8 },
		"byte without bits":   func(x *Index) { x.Points[1].Bits = 0 },
		"more bits":           func(x *Index) { x.Points[1].Byte = 0xb0 },
		"start with bits":     func(x *Index) { x.Points[1].Start = true },
		"start with window":   func(x *Index) { x.Points[2].Start = true },
		"after the blob":      func(x *Index) { x.Points[3].In = x.BlobSize + 1 },
		"after the tar":       func(x *Index) { x.Points[3].Out = x.TarSize + 1 },
		"long span":           func(x *Index) { x.Points[3].Out, x.TarSize = 4*MaxSpan, 5*MaxSpan },
		"long last span":      func(x *Index) { x.TarSize = 4*testSpan + MaxSpan + 1 },
		"long window":         func(x *Index) { x.Points[1].Window = make([]byte, maxWindow+1) },
		"frame with a window": func(x *Index) { x.Kind = Zstd },
		"sizes differ":        func(x *Index) { x.Kind = None },
		"whiteouts":           func(x *Index) { x.Summary.Whiteouts = -1 },
	}
	for name, change := range cases {
		t.Run(name, func(t *testing.T) {
			x := gzipSample(t)
			change(x)
			if _, err := x.Encode(); !errors.Is(err, ErrDamaged) {
				t.Fatalf("Encode: %v", err)
			}
		})
	}
}

// TestInconsistentEncodingIsRejected checks that Decode does not rely on Encode's checks.
func TestInconsistentEncodingIsRejected(t *testing.T) {
	good := encode(t, gzipSample(t))
	seal := func(body []byte) []byte {
		sum := sha256.Sum256(body)
		return append(bytes.Clone(body), sum[:]...)
	}
	body := good[:len(good)-sha256.Size]
	if _, err := Decode(seal(body)); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(body); i += 1 + i/300 { // the windows are long
		changed := bytes.Clone(body)
		changed[i] ^= 0xff
		x, err := Decode(seal(changed))
		if err != nil && !errors.Is(err, ErrDamaged) {
			t.Fatalf("byte %d: %v", i, err)
		}
		if err == nil {
			if err := x.check(); err != nil {
				t.Fatalf("byte %d: %v", i, err)
			}
		}
		if _, err := Decode(append(changed, good[len(body):]...)); !errors.Is(err, ErrDamaged) {
			t.Fatalf("byte %d with the old checksum: %v", i, err)
		}
	}
	for n := 0; n < len(body); n += 1 + n/300 {
		if _, err := Decode(seal(body[:n])); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	if _, err := Decode(seal(append(bytes.Clone(body), 0))); !errors.Is(err, ErrDamaged) {
		t.Fatalf("one byte more: %v", err)
	}
}

func TestSpans(t *testing.T) {
	x := gzipSample(t)
	want := []struct{ in, inSize, out, outSize, grid, gridSize int64 }{
		{0, Grid + 10, 0, testSpan + 7, 0, 2 * Grid},
		{Grid + 10, 2*Grid - 10, testSpan + 7, 2*testSpan - 7, Grid, 2 * Grid},
		{3 * Grid, Grid, 3 * testSpan, testSpan, 3 * Grid, Grid},
		{4 * Grid, Grid + 1, 4 * testSpan, testSpan, 4 * Grid, Grid + 1},
	}
	if x.Spans() != len(want) {
		t.Fatalf("%d spans", x.Spans())
	}
	for i, w := range want {
		s := x.Span(i)
		if s.In != w.in || s.InSize != w.inSize || s.Out != w.out || s.OutSize != w.outSize {
			t.Errorf("span %d: %+v", i, s)
		}
		if offset, size := x.GridRange(i, i); offset != w.grid || size != w.gridSize {
			t.Errorf("grid of span %d: %d, %d", i, offset, size)
		}
		for _, offset := range []int64{w.out, w.out + w.outSize - 1} {
			if got := x.SpanAt(offset); got != i {
				t.Errorf("byte %d of the tar is in span %d, not %d", offset, got, i)
			}
		}
	}
	if offset, size := x.GridRange(1, 3); offset != Grid || size != 4*Grid+1 {
		t.Errorf("grid of spans 1 to 3: %d, %d", offset, size)
	}
}

func TestVerify(t *testing.T) {
	for _, size := range []int{1, Grid - 1, Grid, Grid + 1, 4 * Grid, 4*Grid + 77} {
		x, blob := sample(t, size)
		for begin := 0; begin < size; begin += Grid {
			for end := begin; ; end = min(end+Grid, size) {
				if err := x.Verify(int64(begin), blob[begin:end]); err != nil {
					t.Fatalf("size %d, %d to %d: %v", size, begin, end, err)
				}
				if end > begin {
					wrong := bytes.Clone(blob[begin:end])
					wrong[len(wrong)/2] ^= 1
					if err := x.Verify(int64(begin), wrong); !errors.Is(err, ErrMismatch) {
						t.Fatalf("size %d, %d to %d, one bit changed: %v", size, begin, end, err)
					}
				}
				if end == size {
					break
				}
			}
		}
	}
}

func TestVerifyNeedsTheGrid(t *testing.T) {
	x, blob := sample(t, 4*Grid+77)
	for _, r := range [][2]int{{1, Grid}, {0, Grid + 1}, {Grid, Grid + 1}, {4*Grid + 1, len(blob)}} {
		if err := x.Verify(int64(r[0]), blob[r[0]:r[1]]); err == nil || errors.Is(err, ErrMismatch) {
			t.Errorf("%v: %v", r, err)
		}
	}
	if err := x.Verify(-Grid, blob[:Grid]); err == nil {
		t.Error("a negative offset is accepted")
	}
	if err := x.Verify(4*Grid, make([]byte, 78)); err == nil {
		t.Error("a range after the end is accepted")
	}
}

// TestSamePlaceIsVerified checks that a state is bound to its offset.
func TestSamePlaceIsVerified(t *testing.T) {
	x, blob := sample(t, 4*Grid)
	if err := x.Verify(Grid, blob[:Grid]); !errors.Is(err, ErrMismatch) {
		t.Fatalf("first range as the second: %v", err)
	}
}

func TestDictionary(t *testing.T) {
	x := gzipSample(t)
	got, err := x.Points[1].Dictionary()
	if err != nil || len(got) != WindowSize/6*6 {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if got, err := x.Points[0].Dictionary(); len(got) != 0 || err != nil {
		t.Fatalf("start has %d bytes, %v", len(got), err)
	}
	var c WindowCompressor
	long, err := c.Compress(make([]byte, WindowSize+1))
	if err != nil {
		t.Fatal(err)
	}
	for name, window := range map[string][]byte{"too long": long, "no deflate": []byte("\xff\xff\xff"), "cut": long[:len(long)-1]} {
		if _, err := (&Point{Window: window}).Dictionary(); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPointReaderStopsAtDamage(t *testing.T) {
	x := gzipSample(t)
	b := x.points()
	for n := range b {
		r := NewPointReader(bytes.NewReader(b[:n]))
		var err error
		for err == nil {
			_, err = r.Next()
		}
		if !errors.Is(err, io.EOF) && !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	plain, _ := sample(f, 2*Grid+5)
	for _, x := range []*Index{plain, gzipSample(f), chunksSample(), sealedSample()} {
		b := encode(f, x)
		f.Add(b[:len(b)-sha256.Size])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		sum := sha256.Sum256(body)
		x, err := Decode(append(body[:len(body):len(body)], sum[:]...))
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
			return
		}
		for i := range x.Spans() {
			s := x.Span(i)
			offset, size := x.GridRange(i, i)
			if s.InSize < 0 || s.OutSize < 0 || offset < 0 || offset+size > x.BlobSize || s.In < offset || s.In+s.InSize > offset+size {
				t.Fatalf("span %d: %+v, grid %d, %d", i, s, offset, size)
			}
			if _, err := x.Points[i].Dictionary(); err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
		}
		b, err := x.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Decode(b); err != nil || !reflect.DeepEqual(again, x) {
			t.Fatalf("%v: %+v, not %+v", err, again, x)
		}
	})
}
