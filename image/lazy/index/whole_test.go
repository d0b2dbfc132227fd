package index

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/opencontainers/go-digest"
)

// wholeSample returns an index with files.
func wholeSample(t testing.TB) *Index {
	t.Helper()
	x := gzipSample(t)
	x.Tree, x.Record = []byte("tree"), []byte("record")
	x.TreeDigest, x.RecordDigest = digest.FromBytes(x.Tree), digest.FromBytes(x.Record)
	return x
}

func encodeWhole(t testing.TB, x *Index, hints ...int) []byte {
	t.Helper()
	b, err := x.EncodeWhole(hints)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWholeIsReversible(t *testing.T) {
	x := wholeSample(t)
	many := slices.Repeat([]int{1}, MaxHints+1)
	for name, c := range map[string]struct{ hints, want []int }{
		"no hints":             {nil, nil},
		"hints":                {[]int{2, 0}, []int{2, 0}},
		"hints that are wrong": {[]int{4, 3, 1 << 20}, []int{3}},
		"too many hints":       {many, many[:MaxHints]},
	} {
		t.Run(name, func(t *testing.T) {
			got, hints, err := DecodeWhole(encodeWhole(t, x, c.hints...), wide)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(encode(t, got), encode(t, x)) || string(got.Tree) != "tree" || string(got.Record) != "record" ||
				!slices.Equal(hints, c.want) {
				t.Errorf("%+v with hints %v", got, hints)
			}
		})
	}
}

func TestDamagedWholeIsRejected(t *testing.T) {
	good := encodeWhole(t, wholeSample(t), 1)
	other := bytes.Clone(good)
	other[len(wholeMagic)-2]++ // another version
	for name, b := range map[string][]byte{
		"nothing": nil, "another version": other, "truncated": good[:len(good)-1], "longer": append(bytes.Clone(good), 0),
		"another tree": bytes.Replace(good, []byte("\x04tree"), []byte("\x04eert"), 1),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := DecodeWhole(b, wide); !errors.Is(err, ErrDamaged) {
				t.Error(err)
			}
		})
	}
}

// FuzzDecodeWhole reads what another node sends.
func FuzzDecodeWhole(f *testing.F) {
	f.Add(encodeWhole(f, wholeSample(f), 2, 1))
	f.Add([]byte(wholeMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, hints, err := DecodeWhole(b, wide)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Error(err)
			}
			return
		}
		for _, i := range hints {
			if i < 0 || i >= x.Spans() {
				t.Errorf("hint %d of %d spans", i, x.Spans())
			}
		}
		again, err := x.EncodeWhole(hints)
		if err != nil {
			t.Fatal(err)
		}
		if y, _, err := DecodeWhole(again, wide); err != nil || y.TreeDigest != x.TreeDigest {
			t.Errorf("after encoding again: %v", err)
		}
	})
}

// wide are bounds that no test exceeds.
var wide = Bounds{Tar: 1 << 40, Data: 1 << 40}

// An index whose layer would be too large is refused before its points are decoded.
func TestDecodeWholeWithinBounds(t *testing.T) {
	x := wholeSample(t)
	b := encodeWhole(t, x)
	for name, bounds := range map[string]Bounds{"tar": {Tar: x.TarSize - 1, Data: x.DataSize}, "data": {Tar: x.TarSize, Data: x.DataSize - 1}} {
		if _, _, err := DecodeWhole(b, bounds); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := DecodeWhole(b, Bounds{Tar: x.TarSize, Data: x.DataSize}); err != nil {
		t.Error(err)
	}
	x.TarSize = Grid // far fewer bytes than points
	if most, err := wide.check(x); err != nil || most != 65 {
		t.Errorf("%d points, %v", most, err)
	}
}

// An index of another layer is refused by its numbers, before its states and points are read.
func TestDecodeWholeOfAnotherLayer(t *testing.T) {
	x := wholeSample(t)
	b := encodeWhole(t, x)
	b[bytes.Index(b, x.States[0][:])] ^= 1 // the checksum is wrong
	other := errors.New("of another layer")
	of := func(got *Index) error {
		if got.Blob != x.Blob || got.BlobSize != x.BlobSize || got.DiffID != x.DiffID || got.States != nil || got.Points != nil {
			t.Errorf("%+v", got)
		}
		return other
	}
	if _, _, err := DecodeWhole(b, Bounds{Tar: 1 << 40, Data: 1 << 40, Of: of}); !errors.Is(err, other) {
		t.Error(err)
	}
	if _, _, err := DecodeWhole(b, wide); !errors.Is(err, ErrDamaged) {
		t.Error(err)
	}
}

// A whole index that is read from its files is the one that is encoded in memory.
func TestOpenWhole(t *testing.T) {
	x := wholeSample(t)
	hints := []int{2, 0}
	want := encodeWhole(t, x, hints...)
	encoded := encode(t, x)
	open := func(encoded, tree, record []byte) (*Whole, error) {
		return OpenWhole(inMemory(encoded), inMemory(tree), inMemory(record), hints)
	}
	w, err := open(encoded, x.Tree, x.Record)
	if err != nil {
		t.Fatal(err)
	}
	if w.Blob != x.Blob || w.DiffID != x.DiffID || w.Size() != int64(len(want)) {
		t.Errorf("%+v", w)
	}
	if err := iotest.TestReader(io.NewSectionReader(w, 0, w.Size()), want); err != nil {
		t.Error(err)
	}
	if n, err := w.ReadAt(make([]byte, 5), w.Size()-3); n != 3 || !errors.Is(err, io.EOF) {
		t.Errorf("%d bytes, %v", n, err)
	}
	for name, files := range map[string][3][]byte{
		"empty index": {nil, x.Tree, x.Record}, "short index": {encoded[:40], x.Tree, x.Record},
		"damaged index": {append([]byte{encoded[0]}, append([]byte("x"), encoded[2:]...)...), x.Tree, x.Record},
		"damaged state": {bytes.Replace(encoded, x.States[0][:], make([]byte, len(x.States[0])), 1), x.Tree, x.Record},
		"another tree":  {encoded, []byte("eert"), x.Record}, "another record": {encoded, x.Tree, nil},
	} {
		if _, err := open(files[0], files[1], files[2]); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
