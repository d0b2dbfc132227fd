package toc

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"io"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/blobindex"
	"berth/image/tree"
	"berth/image/unpack"
)

// ztocVersion is the only version of the format that SOCI has ever written.
const ztocVersion = "0.9"

// Fields of SOCI's flatbuffer (ztoc.fbs).
const (
	ztocFieldVersion = iota
	_                // the tool
	ztocFieldBlobSize
	ztocFieldTarSize
	ztocFieldTOC
	ztocFieldCompression
)

const (
	compressionFieldKind = iota
	compressionFieldLast // number of the last span
	compressionFieldSums
	compressionFieldPoints
)

const (
	fileFieldName = iota
	fileFieldType
	fileFieldOffset
	fileFieldSize
	fileFieldLink
	fileFieldMode
	fileFieldUID
	fileFieldGID
	_ // names of user and group
	_
	fileFieldTime
	fileFieldMajor
	fileFieldMinor
	fileFieldRecords // of PAX
)

// ztocGzip is the only compression that is supported.
const ztocGzip = 1

// A point in ztocFieldPoints: offsets in the blob and in the tar, a byte with the number of bits,
// and the window.
const (
	ztocHeader = 4 + 8 // the number of points, and the distance between them
	ztocPoint  = 8 + 8 + 1 + blobindex.WindowSize
	// gzipHeader is the place of the first point if the list lacks it. Older versions of SOCI leave
	// it out.
	gzipHeader = 10
)

// OfZtoc returns the Ref of SOCI's table of a blob. The table is a separate blob. ok is false if
// the blob or the table cannot be used.
func OfZtoc(blob, ztoc ocispec.Descriptor) (r Ref, ok bool) {
	r = Ref{kind: blobindex.Gzip, digest: ztoc.Digest, blobSize: blob.Size, ztoc: true}
	fits := blob.Size > 0 && blob.Size <= maxBlob && ztoc.Size > 0 && ztoc.Size <= maxTable
	return r, fits && isSHA256(blob.Digest) && isSHA256(ztoc.Digest)
}

// MaxZtoc limits SOCI's table, in bytes.
const MaxZtoc = maxTable

// ztoc is the part of SOCI's table that only this format has.
type ztoc struct {
	tarSize int64
	points  []blobindex.Point
	seals   []blobindex.Seal

	next int64 // end of the last content in the tar
	span int   // of next
}

// readZtoc reads SOCI's table.
func readZtoc(ctx context.Context, r Ref, from From) (*Table, error) {
	if from.Ztoc == nil {
		return nil, malformed("SOCI's table is not there")
	}
	text, err := from.Ztoc(ctx)
	if err != nil {
		return nil, err
	}
	if digest.FromBytes(text) != r.digest {
		return nil, malformed("another digest than %s", r.digest)
	}
	z, err := parseZtoc(text, r.blobSize)
	if err != nil {
		return nil, err
	}
	return &Table{ref: r, text: text, ztoc: z, end: r.blobSize}, nil
}

// parseZtoc reads SOCI's table without its entries.
func parseZtoc(text []byte, blobSize int64) (*ztoc, error) {
	f := newFlat(text)
	root := f.root()
	how := root.table(ztocFieldCompression)
	z := &ztoc{tarSize: root.int64(ztocFieldTarSize)}
	version, said := root.string(ztocFieldVersion), root.int64(ztocFieldBlobSize)
	kind, last := how.number(compressionFieldKind, 1, ztocGzip), how.number(compressionFieldLast, 4, 0)
	sums, points := how.vector(compressionFieldSums, 4), how.vector(compressionFieldPoints, 1).bytes()
	switch {
	case f.err != nil:
		return nil, f.err
	case version != ztocVersion || kind != ztocGzip:
		return nil, malformed("version %.20q, compression %d", version, kind)
	case said != blobSize || z.tarSize <= 0 || z.tarSize > maxBlob:
		return nil, malformed("a blob of %d bytes, and not %d, with a tar of %d", said, blobSize, z.tarSize)
	case int64(sums.n) != int64(last)+1:
		return nil, malformed("%d digests of %d spans", sums.n, last+1)
	}
	if err := z.setPoints(points, sums.n, blobSize); err != nil {
		return nil, err
	}
	for i := range sums.n {
		if err := z.setSeal(i, sums.string(i)); err != nil {
			return nil, err
		}
	}
	return z, f.err
}

// setPoints reads the points. The first span begins at the header of the blob, and gets a point if
// the list lacks it.
func (z *ztoc) setPoints(b []byte, n int, blobSize int64) error {
	z.points = []blobindex.Point{{Start: true}}
	switch {
	case len(b) < ztocHeader || int64(binary.LittleEndian.Uint32(b)) != int64(n):
		return malformed("%d bytes of %d points", len(b), n)
	case len(b) == ztocHeader+(n-1)*ztocPoint:
		z.points = append(z.points, blobindex.Point{In: gzipHeader})
	case len(b) != ztocHeader+n*ztocPoint:
		return malformed("%d bytes of %d points", len(b), n)
	}
	z.seals = make([]blobindex.Seal, n+1)
	var compressor blobindex.WindowCompressor
	for b = b[ztocHeader:]; len(b) > 0; b = b[ztocPoint:] {
		p := blobindex.Point{In: int64(binary.LittleEndian.Uint64(b)), Out: int64(binary.LittleEndian.Uint64(b[8:])), Bits: b[16]} //nolint:gosec // checked below
		before := &z.points[len(z.points)-1]
		isFirst := len(z.points) == 1
		if p.In <= before.In || p.In >= blobSize || isFirst != (p.Out == 0) || p.Out < before.Out ||
			!isFirst && p.Out == before.Out ||
			p.Out >= z.tarSize || p.Bits > 7 || isFirst && p.Bits > 0 {
			return malformed("point at %d of the blob and %d of the tar", p.In, p.Out)
		}
		var err error
		window := b[ztocPoint-min(p.Out, blobindex.WindowSize) : ztocPoint]
		if p.Window, err = compressor.Compress(window); err != nil {
			return err
		}
		z.points = append(z.points, p)
	}
	return nil
}

// setSeal sets the digest of a span.
func (z *ztoc) setSeal(i int, sum string) error {
	d := digest.Digest(sum)
	if !isSHA256(d) {
		return malformed("span %d has the digest %.100q", i, sum)
	}
	_, err := hex.Decode(z.seals[i+1][:], []byte(d.Encoded()))
	return err
}

// outEnd returns where the tar of a span ends.
func (z *ztoc) outEnd(span int) int64 {
	if span+1 < len(z.points) {
		return z.points[span+1].Out
	}
	return z.tarSize
}

// extent adds the content of an entry, as a chunk for each span that has a part of the content. Its
// place in the blob is recorded as its place in the tar.
func (s *surveyor) extent(e *entry) error {
	z := s.t.ztoc
	if e.Offset < z.next || e.Size > z.tarSize-e.Offset {
		return malformed("%.100q has %d bytes at %d of the tar", e.Name, e.Size, e.Offset)
	}
	for z.next = e.Offset; s.left > 0; {
		for z.outEnd(z.span) <= z.next {
			z.span++
		}
		size := min(s.left, z.outEnd(z.span)-z.next)
		s.t.chunks = append(s.t.chunks, chunk{offset: z.next, size: size, file: len(s.t.files) - 1, at: e.Size - s.left})
		s.left -= size
		z.next += size
	}
	return nil
}

// sealedIndex is Index of SOCI's table. Its tar ends with the last content.
func (t *Table) sealedIndex(x *blobindex.Index, starts []int64) *blobindex.Index {
	for i := range t.chunks {
		c := &t.chunks[i]
		x.Chunks = append(x.Chunks, blobindex.Chunk{Out: c.offset, Size: c.size, Data: starts[c.file] + c.at})
		x.TarSize = c.offset + c.size
	}
	x.Seals = t.ztoc.seals
	for _, p := range t.ztoc.points {
		if p.Out >= x.TarSize { // nothing decompresses the span
			p.Out, p.Window = x.TarSize, nil
		}
		x.Points = append(x.Points, p)
	}
	return x
}

// ztocReader reads the entries of SOCI's table.
type ztocReader struct {
	f     *flat
	files flatVector
	at    int
}

func newZtocReader(text []byte) *ztocReader {
	f := newFlat(text)
	return &ztocReader{f: f, files: f.root().table(ztocFieldTOC).vector(0, 4)}
}

// next implements entries.
func (r *ztocReader) next() (e entry, err error) {
	if r.f.err != nil {
		return e, r.f.err
	}
	if r.at >= r.files.n {
		return e, io.EOF
	}
	t := r.files.table(r.at)
	r.at++
	e = entry{Name: t.string(fileFieldName), Type: t.string(fileFieldType), Offset: t.int64(fileFieldOffset),
		Size: t.int64(fileFieldSize), LinkName: t.string(fileFieldLink), Mode: t.int64(fileFieldMode),
		UID: int(t.number(fileFieldUID, 4, 0)), GID: int(t.number(fileFieldGID, 4, 0)), ModTime: t.string(fileFieldTime),
		DevMajor: t.int64(fileFieldMajor), DevMinor: t.int64(fileFieldMinor)}
	if e.Type == typeChunk {
		return e, malformed("%.100q has the type %.20q", e.Name, e.Type)
	}
	return e, r.records(&e, t.vector(fileFieldRecords, 4))
}

// records reads the PAX records of an entry. It keeps the extended attributes.
func (r *ztocReader) records(e *entry, list flatVector) error {
	for i := range list.n {
		record := list.table(i)
		key := record.string(0)
		if strings.HasPrefix(key, "GNU.sparse.") { // the size field is not the size of the content in the tar
			return malformed("%.100q is sparse", e.Name)
		}
		name, ok := strings.CutPrefix(key, unpack.XattrRecord)
		if !ok {
			continue
		}
		if e.Xattrs == nil {
			e.Xattrs = map[string][]byte{}
		}
		if e.Xattrs[name] = []byte(record.string(1)); len(e.Xattrs) > tree.MaxXattrs {
			return malformed("%d extended attributes", len(e.Xattrs))
		}
	}
	return r.f.err
}
