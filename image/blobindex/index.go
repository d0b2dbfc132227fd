package blobindex

import (
	"errors"
	"fmt"
	"sort"

	"github.com/opencontainers/go-digest"

	"berth/image/unpack/checksum"
)

const (
	// Grid is the number of bytes between two states.
	Grid = 64 << 10
	// MaxSpan is the longest span, in bytes of the tar. One deflate block of zlib has at most 8
	// MiB.
	MaxSpan = 32 << 20
	// WindowSize is the distance that deflate can refer back.
	WindowSize = 32 << 10
)

// Compression is the compression of a blob.
type Compression uint8

// Compressions. With None the blob is the tar, and each point has the same place in both.
const (
	None Compression = iota
	Gzip
	Zstd
)

var compressions = [...]string{"none", "gzip", "zstd"}

// String implements fmt.Stringer.
func (c Compression) String() string {
	if int(c) < len(compressions) {
		return compressions[c]
	}
	return fmt.Sprintf("compression %d", uint8(c))
}

// ErrDamaged is wrapped by errors about bytes that are no index, or an inconsistent index.
var ErrDamaged = errors.New("index of a blob is damaged")

// ErrMismatch is wrapped by the error if bytes are not the blob's bytes.
var ErrMismatch = errors.New("the bytes are not those of the blob")

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// Index describes one blob and its layer.
type Index struct {
	Blob     digest.Digest // of the compressed blob, by SHA-256
	BlobSize int64
	DiffID   digest.Digest // of the tar
	TarSize  int64
	Kind     Compression

	// States are the states of the blob's SHA-256 after each Grid bytes. The states at the start
	// and at the end of the blob are left out.
	States []State
	// Points are in the order of the blob. The first point is at the blob's start.
	Points []Point

	// Chunks, if there are any, replace the States: see OfChunks.
	Chunks []Chunk
	// Seals, if there are any, replace the Sums of Chunks: see Sealed.
	Seals []Seal

	TreeDigest   digest.Digest // by SHA-256
	RecordDigest digest.Digest // by SHA-256
	DataSize     int64         // of the layer's data file
	Summary      Summary

	Tree   []byte // the layer's tree file (package tree)
	Record []byte // the record of the layer's tar (package tarsplit)
}

// Summary has further fields of the layer's record (unpack.Summary).
type Summary struct {
	Bytes, Inodes uint64 // disk usage of the complete layer
	Opaque        bool
	Whiteouts     int
	Sum           checksum.Sum
}

// Point is a place where decompression can begin.
type Point struct {
	In  int64 // offset in the blob of the first whole byte
	Out int64 // offset in the tar
	// Start is set where a gzip member or a zstd frame begins, and in a tar that is not compressed.
	// It needs no window. Otherwise a deflate block begins.
	Start bool
	// Bits is the number of bits that belong to the block from the byte before In, 0 to 7. They
	// are the most significant bits of that byte, and of Byte. The other bits of Byte are zero.
	Bits uint8
	Byte byte
	// Window is the tar before Out as far back as the block may refer, WindowSize bytes or less. It
	// is compressed with deflate. It is empty if the block refers to nothing.
	Window []byte
}

// Span is what lies between two points.
type Span struct {
	Point
	InSize  int64 // bytes of the blob from In on
	OutSize int64 // bytes of the tar
}

// SetFiles sets Tree and Record. The error wraps ErrDamaged if they do not have the digests in the
// index.
func (x *Index) SetFiles(tree, record []byte) error {
	if digest.FromBytes(tree) != x.TreeDigest || digest.FromBytes(record) != x.RecordDigest {
		return damaged("another tree or record")
	}
	x.Tree, x.Record = tree, record
	return nil
}

// Spans returns the number of spans.
func (x *Index) Spans() int { return len(x.Points) }

// Span returns the span of a number.
func (x *Index) Span(i int) Span {
	in, out := x.BlobSize, x.TarSize
	if i+1 < len(x.Points) {
		in, out = x.Points[i+1].In, x.Points[i+1].Out
	}
	p := x.Points[i]
	return Span{Point: p, InSize: in - p.In, OutSize: out - p.Out}
}

// SpanAt returns the number of the span that has a byte of the tar, 0 <= offset < TarSize.
func (x *Index) SpanAt(offset int64) int {
	return sort.Search(len(x.Points), func(i int) bool { return x.Points[i].Out > offset }) - 1
}

// GridRange returns the smallest range of the blob that has the spans from first to last and can be
// verified. Both are included. The range may be empty, because a span can have no bytes of the
// blob.
//
// An index of chunks has no grid, so the range is exactly the spans.
func (x *Index) GridRange(first, last int) (offset, size int64) {
	begin, end := x.Points[first].In, x.Span(last)
	if x.OfChunks() {
		if x.Points[first].Bits > 0 {
			begin-- // the index does not keep the byte with these bits, so the range has it
		}
		return begin, end.In + end.InSize - begin
	}
	offset = begin / Grid * Grid
	return offset, min((end.In+end.InSize+Grid-1)/Grid*Grid, x.BlobSize) - offset
}
