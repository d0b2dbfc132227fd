package toc

import (
	"github.com/opencontainers/go-digest"

	"berth/image/blobindex"
	"berth/image/tree"
)

// tailSpan is the length of spans that have no content, after the last file.
const tailSpan = 8 << 20

// Size returns the length of all files, in bytes.
func (t *Table) Size() int64 { return t.size }

// Index returns the index of the blob's chunks, without tree, record and summary.
func (t *Table) Index(blob, diffID digest.Digest) *blobindex.Index {
	x := &blobindex.Index{Blob: blob, BlobSize: t.ref.blobSize, DiffID: diffID, Kind: t.ref.kind}
	starts, next := make([]int64, len(t.files)), int64(0)
	for i, size := range t.files {
		starts[i] = next
		next += blocks(size) * tree.BlockSize
	}
	x.DataSize = next
	if t.ztoc != nil {
		return t.sealedIndex(x, starts)
	}
	if t.chunks[0].offset > 0 {
		x.Points = append(x.Points, blobindex.Point{Start: true})
	}
	begin, out := int64(0), int64(0) // of the span in the tar, and its end
	for i := range t.chunks {
		c := &t.chunks[i]
		if i == 0 || c.offset != t.chunks[i-1].offset {
			begin = out
			x.Points = append(x.Points, blobindex.Point{In: c.offset, Out: begin, Start: true})
		}
		x.Chunks = append(x.Chunks,
			blobindex.Chunk{Out: begin + c.inner, Size: c.size, Data: starts[c.file] + c.at, Sum: c.sum})
		out = begin + c.inner + c.size
	}
	x.TarSize = out
	for at := t.end; at < t.ref.blobSize; at += tailSpan {
		x.Points = append(x.Points, blobindex.Point{In: at, Out: out, Start: true})
	}
	return x
}
