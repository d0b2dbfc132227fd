package blobindex

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sort"
)

// chunksMagic begins an encoded index of chunks. Its number is the version of the format.
const chunksMagic = "berth chunk index 1\n"

// Chunk is a part of a file's content, in one span.
type Chunk struct {
	Out, Size int64             // in the tar of the index
	Data      int64             // place in the data file
	Sum       [sha256.Size]byte // SHA-256 of the content; unused if the index is sealed
}

// OfChunks reports whether the index is one of chunks: see the package's contract.
func (x *Index) OfChunks() bool { return len(x.Chunks) > 0 }

// CheckChunks returns an error that wraps ErrDamaged if an index of chunks is inconsistent, or if a
// span is too long. Encode does that, too.
func (x *Index) CheckChunks() error {
	if !x.OfChunks() {
		return damaged("no chunks")
	}
	return x.checkChunks()
}

// VerifySpan checks the chunks of a span, whose part of the tar is given. The error wraps
// ErrMismatch if one has other bytes. It accepts all bytes if the index is not one of chunks, or is
// sealed.
func (x *Index) VerifySpan(i int, tar []byte) error {
	if x.Sealed() {
		return nil
	}
	s := x.Span(i)
	first := sort.Search(len(x.Chunks), func(n int) bool { return x.Chunks[n].Out >= s.Out })
	for n := first; n < len(x.Chunks) && x.Chunks[n].Out < s.Out+s.OutSize; n++ {
		c := &x.Chunks[n]
		at := c.Out - s.Out
		if at+c.Size > int64(len(tar)) || sha256.Sum256(tar[at:at+c.Size]) != c.Sum {
			return fmt.Errorf("%w %s: chunk of %d bytes in the span at %d", ErrMismatch, x.Blob, c.Size, s.In)
		}
	}
	return nil
}

// encodeChunks is Encode for an index of chunks.
func (x *Index) encodeChunks() ([]byte, error) {
	if err := x.checkChunks(); err != nil {
		return nil, err
	}
	kind, points := chunksMagic, x.startPoints
	if x.Sealed() {
		kind, points = sealedMagic, x.sealedPoints
	}
	b := []byte(kind)
	for _, part := range [][]byte{x.numbers(), points(), x.encodedChunks()} {
		b = binary.AppendUvarint(b, uint64(len(part)))
		b = append(b, part...)
	}
	if len(b)+sha256.Size > MaxEncoded {
		return nil, damaged("it has %d bytes", len(b))
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// startPoints encodes the points of an index that is not sealed. All of them begin a member or
// frame.
func (x *Index) startPoints() (b []byte) {
	var last Point
	for i := range x.Points {
		p := &x.Points[i]
		b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(p.In-last.In)), uint64(p.Out-last.Out))
		last = *p
	}
	return b
}

func (x *Index) encodedChunks() (b []byte) {
	var out, data int64
	for i := range x.Chunks {
		c := &x.Chunks[i]
		for _, n := range []int64{c.Out - out, c.Size, c.Data - data} {
			b = binary.AppendUvarint(b, uint64(n))
		}
		if !x.Sealed() {
			b = append(b, c.Sum[:]...)
		}
		out, data = c.Out+c.Size, c.Data+c.Size
	}
	return b
}

// decodeChunks is Decode for an index of chunks.
func decodeChunks(b []byte) (*Index, error) {
	kind, sealed := chunksMagic, bytes.HasPrefix(b, []byte(sealedMagic))
	if sealed {
		kind = sealedMagic
	}
	parts, err := sections(b, kind)
	if err == nil {
		err = checkSum(b)
	}
	if err != nil {
		return nil, err
	}
	x := &Index{}
	if err := x.setNumbers(parts[0]); err != nil {
		return nil, err
	}
	if sealed {
		err = x.setSealedPoints(parts[1])
	} else {
		err = x.setStartPoints(parts[1])
	}
	if err == nil {
		err = x.setChunks(parts[2])
	}
	if err != nil {
		return nil, err
	}
	return x, x.checkChunks()
}

func (x *Index) setStartPoints(b []byte) (err error) {
	var last Point
	for len(b) > 0 {
		var gap [2]int64
		if b, err = gaps(b, gap[:]); err != nil {
			return err
		}
		last = Point{In: last.In + gap[0], Out: last.Out + gap[1], Start: true}
		x.Points = append(x.Points, last)
	}
	return nil
}

// setChunks decodes chunks after the points.
func (x *Index) setChunks(b []byte) (err error) {
	var out, data int64
	for len(b) > 0 {
		var gap [3]int64
		if b, err = gaps(b, gap[:]); err != nil {
			return err
		}
		c := Chunk{Out: out + gap[0], Size: gap[1], Data: data + gap[2]}
		if !x.Sealed() {
			if len(b) < sha256.Size {
				return damaged("a chunk ends too soon")
			}
			c.Sum, b = [sha256.Size]byte(b), b[sha256.Size:]
		}
		x.Chunks = append(x.Chunks, c)
		out, data = c.Out+c.Size, c.Data+c.Size
	}
	return nil
}

// maxGap limits the numbers of an encoding, so that sums of all of them fit into 63 bits.
const maxGap = 1 << 40

// gaps fills to with the numbers at the beginning of b, and returns the rest of b.
func gaps(b []byte, to []int64) (rest []byte, err error) {
	for i := range to {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > maxGap {
			return nil, damaged("malformed number of a chunk")
		}
		to[i], b = int64(n), b[size:]
	}
	return b, nil
}

// checkChunks is check for an index of chunks.
func (x *Index) checkChunks() error {
	switch {
	case !isSHA256(x.Blob) || !isSHA256(x.TreeDigest) || !isSHA256(x.RecordDigest) || x.DiffID.Validate() != nil:
		return damaged("digests %q, %q, %q, %q", x.Blob, x.DiffID, x.TreeDigest, x.RecordDigest)
	case x.Kind != Gzip && x.Kind != Zstd || x.BlobSize <= 0 || x.BlobSize > maxGap || x.TarSize <= 0 || x.DataSize < 0:
		return damaged("%s blob of %d bytes with a tar of %d bytes and %d bytes of data", x.Kind, x.BlobSize, x.TarSize, x.DataSize)
	case len(x.States) > 0 || len(x.Chunks) == 0 || len(x.Points) == 0:
		return damaged("%d states, %d chunks, %d points", len(x.States), len(x.Chunks), len(x.Points))
	case x.Sealed() && (x.Kind != Gzip || len(x.Seals) != len(x.Points)):
		return damaged("%s blob with %d seals of %d spans", x.Kind, len(x.Seals), len(x.Points))
	}
	var last Point
	for i := range x.Points {
		p := &x.Points[i]
		if i == 0 && (p.In != 0 || p.Out != 0) || i > 0 && (p.In <= last.In || p.Out < last.Out) ||
			!p.Start && (i == 0 || !x.Sealed()) {
			return damaged("point at %d of the blob and %d of the tar follows %d and %d", p.In, p.Out, last.In, last.Out)
		}
		last = *p
		if s := x.Span(i); s.InSize < 0 || s.OutSize < 0 || tooLong(s.InSize, s.OutSize) {
			return damaged("span at %d has %d bytes of the blob and %d of the tar", p.In, s.InSize, s.OutSize)
		}
		if err := x.checkSeal(i); err != nil {
			return err
		}
	}
	return x.checkPlaces()
}

// checkPlaces checks that each chunk is in one span, and that no two have the same place.
func (x *Index) checkPlaces() error {
	span, out, data := 0, int64(0), int64(0)
	for i := range x.Chunks {
		c := &x.Chunks[i]
		for span < len(x.Points)-1 && x.Points[span+1].Out <= c.Out {
			span++
		}
		s := x.Span(span)
		if c.Size <= 0 || c.Out < out || c.Data < data || c.Size > x.DataSize-c.Data || c.Out+c.Size > s.Out+s.OutSize {
			return damaged("chunk of %d bytes at %d of the tar and %d of the data", c.Size, c.Out, c.Data)
		}
		out, data = c.Out+c.Size, c.Data+c.Size
	}
	return nil
}
