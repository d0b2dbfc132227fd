package blobindex

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"reflect"
	"testing"
)

// sealedBlob is the blob of sealedSample.
var sealedBlob = bytes.Repeat([]byte("0123456789"), 10)

// sealedSample returns an index with a header of 10 bytes, two spans that share a byte, and one
// without content.
func sealedSample() *Index {
	x := chunksSample()
	x.Points = []Point{{Start: true}, {In: 10}, {In: 50, Out: 7, Bits: 3, Window: []byte{3, 0}}, {In: 90, Out: 8, Bits: 1}}
	for i := range x.Chunks {
		x.Chunks[i].Sum = [sha256.Size]byte{}
	}
	x.Seals = []Seal{{}, sha256.Sum256(sealedBlob[10:50]), sha256.Sum256(sealedBlob[49:90]), sha256.Sum256(sealedBlob[89:])}
	return x
}

func TestSealsAreVerified(t *testing.T) {
	t.Parallel()
	x := sealedSample()
	for i := range x.Spans() {
		offset, size := x.GridRange(i, i)
		raw := bytes.Clone(sealedBlob[offset:][:size])
		p, rest, err := x.Opened(i, raw)
		s := x.Span(i)
		if err != nil || !bytes.Equal(rest, sealedBlob[s.In:][:s.InSize]) {
			t.Errorf("span %d: %q, %v", i, rest, err)
		}
		if want := sealedBlob[max(s.In-1, 0)] &^ (0xff >> s.Bits); s.Bits > 0 && p.Byte != want || s.Bits == 0 && p.Byte != 0 {
			t.Errorf("span %d has the byte %#x", i, p.Byte)
		}
		raw[len(raw)-1]++
		if _, _, err := x.Opened(i, raw); (i > 0) != errors.Is(err, ErrMismatch) {
			t.Errorf("span %d with other bytes: %v", i, err)
		}
		if err := x.VerifySpan(i, nil); err != nil {
			t.Errorf("span %d: %v", i, err)
		}
	}
	if offset, size := x.GridRange(2, 3); offset != 49 || size != 51 {
		t.Errorf("range of two spans: %d bytes at %d", size, offset)
	}
	b := encode(t, x)
	if again, err := Decode(b); err != nil || !reflect.DeepEqual(again, x) {
		t.Errorf("%v: %+v, not %+v", err, again, x)
	}
}

func TestInconsistentSealsAreRejected(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Index){
		"too few":         func(x *Index) { x.Seals = x.Seals[1:] },
		"none of content": func(x *Index) { x.Seals[1] = Seal{} },
		"zstd":            func(x *Index) { x.Kind = Zstd },
		"known byte":      func(x *Index) { x.Points[2].Byte = 0x80 },
		"first inside":    func(x *Index) { x.Points[0].Start = false },
		"start with bits": func(x *Index) { x.Points[2].Start = true },
		"no states":       func(x *Index) { x.States = make([]State, 1) },
		"disorder":        func(x *Index) { x.Points[2].In = 10 },
	} {
		x := sealedSample()
		change(x)
		if _, err := x.Encode(); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
