package blobindex

import (
	"crypto/sha256"
	"errors"
	"testing"

	"github.com/opencontainers/go-digest"
)

// chunksSample returns an index of the chunks "abc" and "de" in one span, and "f" in another.
func chunksSample() *Index {
	return &Index{
		Blob: digest.FromString("blob"), BlobSize: 100, DiffID: digest.FromString("tar"), TarSize: 8, Kind: Gzip,
		TreeDigest: digest.FromString("tree"), RecordDigest: digest.FromString(""), DataSize: 3 * 4096,
		Points: []Point{{Start: true}, {In: 10, Start: true}, {In: 50, Out: 7, Start: true}, {In: 90, Out: 8, Start: true}},
		Chunks: []Chunk{
			{Out: 0, Size: 3, Sum: sha256.Sum256([]byte("abc"))},
			{Out: 5, Size: 2, Data: 4096, Sum: sha256.Sum256([]byte("de"))},
			{Out: 7, Size: 1, Data: 8192, Sum: sha256.Sum256([]byte("f"))},
		},
	}
}

func TestChunksAreVerified(t *testing.T) {
	t.Parallel()
	x := chunksSample()
	for _, c := range []struct {
		span int
		tar  string
		ok   bool
	}{
		{0, "", true}, {1, "abc--de", true}, {1, "abcxyde", true}, {1, "abx--de", false}, {1, "abc--dx", false}, {1, "abc--d", false},
		{2, "f", true}, {2, "g", false}, {3, "", true},
	} {
		if err := x.VerifySpan(c.span, []byte(c.tar)); (err == nil) != c.ok || err != nil && !errors.Is(err, ErrMismatch) {
			t.Errorf("span %d with %q: %v", c.span, c.tar, err)
		}
	}
	if offset, size := x.GridRange(1, 2); offset != 10 || size != 80 {
		t.Errorf("range of two spans: %d bytes at %d", size, offset)
	}
	if i := x.SpanAt(6); i != 1 {
		t.Errorf("the second chunk is in span %d", i)
	}
}

func TestInconsistentChunksAreRejected(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Index){
		"states":             func(x *Index) { x.States = make([]State, 1) },
		"plain":              func(x *Index) { x.Kind = None },
		"no points":          func(x *Index) { x.Points = nil },
		"no start":           func(x *Index) { x.Points[0].In = 1 },
		"points in disorder": func(x *Index) { x.Points[2].In = 10 },
		"tar in disorder":    func(x *Index) { x.Points[2].Out = 0; x.Points[1].Out = 1 },
		"beyond the blob":    func(x *Index) { x.BlobSize = 80 },
		"long span":          func(x *Index) { x.BlobSize = 90 + MaxIn + 1 },
		"chunk of two spans": func(x *Index) { x.Chunks[1].Size = 3 },
		"empty chunk":        func(x *Index) { x.Chunks[1].Size = 0 },
		"same place in tar":  func(x *Index) { x.Chunks[1].Out = 2 },
		"same place in data": func(x *Index) { x.Chunks[1].Data = 2 },
		"beyond the data":    func(x *Index) { x.DataSize = 8192 },
		"no tree":            func(x *Index) { x.TreeDigest = "" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := chunksSample()
			change(x)
			if _, err := x.Encode(); !errors.Is(err, ErrDamaged) {
				t.Error(err)
			}
		})
	}
}
