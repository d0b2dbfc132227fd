package toc

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/blobindex"
)

// Annotations of a layer in a manifest.
const (
	// StargzDigest has the digest of the table of eStargz.
	StargzDigest = "containerd.io/snapshot/stargz/toc.digest"
	// ChunkedDigest has the digest of the compressed table of zstd:chunked.
	ChunkedDigest = "io.github.containers.zstd-chunked.manifest-checksum"
	// ChunkedPosition has the table's place: offset, length, decompressed length, and the type 1.
	ChunkedPosition = "io.github.containers.zstd-chunked.manifest-position"

	// The tools of eStargz use these names for the same.
	chunkedDigest   = "io.containers.zstd-chunked.manifest-checksum"
	chunkedPosition = "io.containers.zstd-chunked.manifest-position"
)

const (
	// stargzName is the name of the table of eStargz in the layer.
	stargzName = "stargz.index.json"
	// tailSize is how many bytes at the end of a blob are fetched first for eStargz. Most tables
	// are not larger.
	tailSize = 64 << 10
	// maxBlob limits a blob. Its index has a point every tailSpan bytes after the last file.
	maxBlob = 1 << 40
	// maxTable limits a table, compressed or not.
	maxTable = blobindex.MaxSpan
)

// ErrMalformed is wrapped by errors about tables that cannot be used.
var ErrMalformed = errors.New("unusable table of contents")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// Ref names the table of contents of a blob.
type Ref struct {
	kind         blobindex.Compression
	digest       digest.Digest
	blobSize     int64
	offset, size int64 // of the compressed table of zstd:chunked
	raw          int64 // its decompressed length
	ztoc         bool  // the table is SOCI's
}

// Find returns the reference of a blob's table from the blob's annotations. ok is false if the blob
// has no table that can be used.
func Find(blob ocispec.Descriptor) (r Ref, ok bool) {
	r = Ref{blobSize: blob.Size}
	if !isSHA256(blob.Digest) || blob.Size <= 0 || blob.Size > maxBlob {
		return r, false
	}
	position := cmp.Or(blob.Annotations[ChunkedPosition], blob.Annotations[chunkedPosition])
	if position == "" {
		r.kind, r.digest = blobindex.Gzip, digest.Digest(blob.Annotations[StargzDigest])
		return r, isSHA256(r.digest)
	}
	r.kind = blobindex.Zstd
	r.digest = digest.Digest(cmp.Or(blob.Annotations[ChunkedDigest], blob.Annotations[chunkedDigest]))
	var numbers [4]int64
	fields := strings.Split(position, ":")
	if len(fields) != len(numbers) || !isSHA256(r.digest) {
		return r, false
	}
	for i, text := range fields {
		var err error
		if numbers[i], err = strconv.ParseInt(text, 10, 64); err != nil || numbers[i] <= 0 {
			return r, false
		}
	}
	r.offset, r.size, r.raw = numbers[0], numbers[1], numbers[2]
	fits := r.size <= maxTable && r.raw <= maxTable && r.offset > skippable && r.size <= r.blobSize &&
		r.offset <= r.blobSize-r.size
	return r, fits && numbers[3] == 1
}

// isSHA256 validates first, because Algorithm panics if there is no separator.
func isSHA256(d digest.Digest) bool { return d.Validate() == nil && d.Algorithm() == digest.SHA256 }

// String names the table.
func (r Ref) String() string {
	if r.ztoc {
		return "soci " + r.digest.String()
	}
	return fmt.Sprintf("%s %s at %d", r.kind, r.digest, r.offset)
}

// skippable is the length of the header of a skippable frame of zstd.
const skippable = 8

// From gives Read what it needs.
type From struct {
	// Fetch returns size bytes of the blob from an offset, unverified.
	Fetch func(ctx context.Context, offset, size int64) ([]byte, error)
	// Inflate decompresses the first out bytes of a gzip member or zstd frame. The input is not
	// verified, so another process must decompress it.
	Inflate func(ctx context.Context, kind blobindex.Compression, in []byte, out int64) ([]byte, error)
	// Ztoc returns the blob of OfZtoc's table, at most MaxZtoc bytes, unverified.
	Ztoc func(ctx context.Context) ([]byte, error)
}

// Read reads a table and verifies its digest. Errors wrap ErrMalformed, or come from the functions
// in From.
func Read(ctx context.Context, r Ref, from From) (t *Table, err error) {
	switch {
	case r.ztoc:
		t, err = readZtoc(ctx, r, from)
	case r.kind == blobindex.Zstd:
		t, err = readChunked(ctx, r, from)
	default:
		t, err = readStargz(ctx, r, from)
	}
	if err == nil {
		err = t.survey()
	}
	if err == nil && t.own != nil {
		err = t.readLast(ctx, from)
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// readLast reads the last member before the table of eStargz.
func (t *Table) readLast(ctx context.Context, from From) error {
	offset := t.chunks[len(t.chunks)-1].offset
	if t.end-offset > maxTable {
		return malformed("a member of %d bytes", t.end-offset)
	}
	packed, err := from.Fetch(ctx, offset, t.end-offset)
	if err != nil {
		return err
	}
	member, err := inflateMember(ctx, packed, from)
	if err != nil {
		return err
	}
	return t.settleOwn(member)
}

// inflateMember decompresses a whole gzip member.
func inflateMember(ctx context.Context, member []byte, from From) ([]byte, error) {
	if len(member) < minMember {
		return nil, malformed("a member of %d bytes", len(member))
	}
	out := int64(binary.LittleEndian.Uint32(member[len(member)-4:])) // the length ends a member
	if out > maxTable {
		return nil, malformed("%d bytes decompressed", out)
	}
	return from.Inflate(ctx, blobindex.Gzip, member, out)
}

// minMember is the length of the smallest gzip member.
const minMember = 18

func readChunked(ctx context.Context, r Ref, from From) (*Table, error) {
	packed, err := from.Fetch(ctx, r.offset, r.size)
	if err != nil {
		return nil, err
	}
	if digest.FromBytes(packed) != r.digest {
		return nil, malformed("another digest than %s", r.digest)
	}
	text, err := from.Inflate(ctx, r.kind, packed, r.raw)
	return &Table{ref: r, text: text, end: r.offset - skippable}, err
}

func readStargz(ctx context.Context, r Ref, from From) (*Table, error) {
	begin := max(r.blobSize-tailSize, 0)
	tail, err := from.Fetch(ctx, begin, r.blobSize-begin)
	if err != nil {
		return nil, err
	}
	offset, footer, err := findTable(tail)
	if err != nil {
		return nil, err
	}
	end := r.blobSize - int64(footer)
	if offset <= 0 || offset >= end || end-offset > maxTable {
		return nil, malformed("%d bytes at %d", end-offset, offset)
	}
	member := tail[:len(tail)-footer]
	if offset < begin {
		first, err := from.Fetch(ctx, offset, begin-offset)
		if err != nil {
			return nil, err
		}
		member = append(first, member...)
	} else {
		member = member[offset-begin:]
	}
	inflated, err := inflateMember(ctx, member, from)
	if err != nil {
		return nil, err
	}
	return stargzTable(r, offset, inflated)
}

// stargzTable finds the table in its member, which is the end of a tar.
func stargzTable(r Ref, offset int64, member []byte) (*Table, error) {
	in := bytes.NewReader(member)
	hdr, err := tar.NewReader(in).Next()
	if err != nil {
		return nil, malformed("header: %v", err)
	}
	inner := int64(len(member) - in.Len())
	if hdr.Name != stargzName || hdr.Typeflag != tar.TypeReg || hdr.Size <= 0 || hdr.Size > int64(in.Len()) {
		return nil, malformed("file %.100q of %d bytes", hdr.Name, hdr.Size)
	}
	text := member[inner:][:hdr.Size]
	if digest.FromBytes(text) != r.digest {
		return nil, malformed("another digest than %s", r.digest)
	}
	own := chunk{offset: offset, inner: inner, size: hdr.Size, sum: sha256.Sum256(text)}
	return &Table{ref: r, text: text, own: hdr, ownChunk: own, end: offset}, nil
}

// findTable reads the footer at the end of a blob. It returns the place of the table, and the
// length of the footer.
func findTable(tail []byte) (offset int64, footer int, err error) {
	const legacy = "\x16\x00"
	const present = "\x1a\x00SG\x16\x00"
	const header, digits, magic, rest = 10, 16, "STARGZ", 13
	for _, extra := range []string{present, legacy} {
		footer = header + len(extra) + digits + len(magic) + rest
		if len(tail) < footer {
			continue
		}
		f := tail[len(tail)-footer:]
		if !bytes.HasPrefix(f, []byte("\x1f\x8b\x08\x04")) || !bytes.HasPrefix(f[header:], []byte(extra)) ||
			!bytes.HasPrefix(f[header+len(extra)+digits:], []byte(magic)) {
			continue
		}
		number := string(f[header+len(extra):][:digits])
		offset, err = strconv.ParseInt(number, 16, 64)
		if err != nil || strings.ContainsAny(number, "+-") {
			return 0, 0, malformed("footer with the offset %q", number)
		}
		return offset, footer, nil
	}
	return 0, 0, malformed("no footer")
}
