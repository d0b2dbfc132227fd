package tarsplit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/opencontainers/go-digest"
)

// stored is the content of a layer. Offsets and names lead to the same bytes.
type stored []byte

// ReadContent implements Content. The name "N" is the content at the offset N.
func (s stored) ReadContent(at Ref, p []byte, offset int64) error {
	if at.Name != "" {
		if _, err := fmt.Sscanf(at.Name, "at %d", &at.Offset); err != nil || at.Offset < 0 {
			return fmt.Errorf("%w: name %q", ErrDamaged, at.Name)
		}
	}
	if n, err := bytes.NewReader(s).ReadAt(p, at.Offset+offset); n < len(p) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// part is a part of a test's tar.
type part struct {
	size    int
	content bool
}

// record records a tar of random parts and returns all three.
func record(t testing.TB, seed uint64, parts []part) (tar []byte, layer stored, file []byte) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	random := func(n int) []byte {
		p := make([]byte, n)
		for i := range p {
			p[i] = byte(r.IntN(4))
		}
		return p
	}
	var in, out bytes.Buffer
	recorder := NewRecorder(&in, &out)
	for i, p := range parts {
		data := random(p.size)
		if p.content {
			at := Ref{Offset: int64(len(layer))}
			if i%2 == 0 {
				at = Ref{Name: fmt.Sprintf("at %d", len(layer))}
			}
			layer = append(append(layer, data...), random(r.IntN(100))...)
			recorder.Content(int64(p.size), at)
		}
		in.Write(data)
		tar = append(tar, data...)
		if _, err := io.CopyN(io.Discard, recorder, int64(p.size)); err != nil {
			t.Fatal(err)
		}
	}
	if kept, err := recorder.Finish(); !kept || err != nil {
		t.Fatal(kept, err)
	}
	return tar, layer, out.Bytes()
}

func partsOf(seed uint64, n int) (parts []part) {
	r := rand.New(rand.NewPCG(seed, 2))
	for range n {
		parts = append(parts, part{r.IntN(1 << r.IntN(18)), r.IntN(2) == 0})
	}
	return parts
}

func TestRoundTrip(t *testing.T) {
	many := make([]part, 20_000)
	for i := range many {
		many[i] = part{1 + i%3, i%2 == 0}
	}
	cases := map[string][]part{
		"nothing": nil, "one byte": {{1, false}}, "only content": {{1 << 20, true}},
		"only headers": {{1 << 20, false}}, "random": partsOf(1, 60), "others": partsOf(2, 200), "many": many,
		"edges": {{literalSize, false}, {1, true}, {literalSize + 1, false}, {0, true}, {blockSize, false}, {blockSize, true}},
	}
	for name, parts := range cases {
		t.Run(name, func(t *testing.T) {
			tar, layer, file := record(t, 1, parts)
			r, err := Open(bytes.NewReader(file), int64(len(file)), int64(len(tar)), layer)
			if err != nil {
				t.Fatal(err)
			}
			if err := iotest.TestReader(io.NewSectionReader(r, 0, r.Size()), tar); err != nil {
				t.Error(err)
			}
			random := rand.New(rand.NewPCG(3, 3))
			for range 50 {
				from, size := random.IntN(len(tar)+1), random.IntN(1<<random.IntN(19)+1)
				p := make([]byte, size)
				n, err := r.ReadAt(p, int64(from))
				if !bytes.Equal(p[:n], tar[from:min(len(tar), from+size)]) || (n < size) != errors.Is(err, io.EOF) {
					t.Fatalf("%d bytes from %d: %d bytes, %v", size, from, n, err)
				}
			}
		})
	}
}

// A tar with too many bytes that do not compress is not kept.
func TestRecordIsBounded(t *testing.T) {
	random := rand.NewChaCha8([32]byte{})
	size := &counter{}
	r := NewRecorder(io.LimitReader(random, MaxFile+1<<20), size)
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Fatal(err)
	}
	if kept, err := r.Finish(); kept || err != nil || size.n > MaxFile || size.n < MaxFile-maxBlock*2 {
		t.Errorf("kept %v, %v, %d bytes", kept, err, size.n)
	}
}

type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) { c.n += int64(len(p)); return len(p), nil }

func TestDrop(t *testing.T) {
	r := NewRecorder(strings.NewReader("abc"), io.Discard)
	r.Drop()
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Fatal(err)
	}
	if kept, err := r.Finish(); kept || err != nil {
		t.Error(kept, err)
	}
}

// A full disk fails the layer.
func TestWriteFails(t *testing.T) {
	full := errors.New("no space")
	r := NewRecorder(strings.NewReader("abc"), writerFunc(func(p []byte) (int, error) { return 0, full }))
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Fatal(err)
	}
	if kept, err := r.Finish(); kept || !errors.Is(err, full) {
		t.Error(kept, err)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// FuzzReader reads records of any bytes. They must not crash the reader or make it allocate without
// bound; what they restore is checked by its digest elsewhere.
func FuzzReader(f *testing.F) {
	for seed := range uint64(3) {
		tar, _, file := record(f, seed, partsOf(seed, 20))
		f.Add(file, int64(len(tar)))
	}
	f.Add([]byte(magic), int64(0))
	layer := stored(bytes.Repeat([]byte("content "), 100))
	f.Fuzz(func(t *testing.T, file []byte, size int64) {
		r, err := Open(bytes.NewReader(file), int64(len(file)), size, layer)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Errorf("open: %v", err)
			}
			return
		}
		d := digest.SHA256.Hash()
		n, err := io.Copy(d, io.LimitReader(io.NewSectionReader(r, 0, r.Size()), 1<<20))
		if err != nil && !errors.Is(err, ErrDamaged) {
			t.Errorf("after %d bytes: %v", n, err)
		}
	})
}
