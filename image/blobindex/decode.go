package blobindex

import (
	"bytes"
	"crypto/sha256"
	_ "crypto/sha512" // for package digest
	"encoding/binary"
	"errors"
	"io"
	"math"

	"github.com/opencontainers/go-digest"

	"berth/image/unpack/checksum"
)

// Decode returns the index of an encoding, without Tree and Record. It shares memory with b. The
// error wraps ErrDamaged.
func Decode(b []byte) (*Index, error) {
	if bytes.HasPrefix(b, []byte(chunksMagic)) || bytes.HasPrefix(b, []byte(sealedMagic)) {
		return decodeChunks(b)
	}
	parts, err := sections(b, magic)
	if err != nil {
		return nil, err
	}
	x := &Index{}
	if err := x.setNumbers(parts[0]); err != nil {
		return nil, err
	}
	if err := checkSum(b); err != nil {
		return nil, err
	}
	if err := x.setStates(parts[1]); err != nil {
		return nil, err
	}
	if x.Points, err = decodePoints(parts[2]); err != nil {
		return nil, err
	}
	if err := x.check(); err != nil {
		return nil, err
	}
	return x, nil
}

// sections returns the sections of an encoding. It does not check the checksum.
func sections(b []byte, magic string) (parts [3][]byte, err error) {
	body := len(b) - sha256.Size
	if len(b) > MaxEncoded || body < len(magic) || !bytes.HasPrefix(b, []byte(magic)) {
		return parts, damaged("unknown format, or %d bytes", len(b))
	}
	rest := b[len(magic):body]
	for i := range parts {
		if parts[i], rest, err = section(rest); err != nil {
			return parts, err
		}
	}
	if len(rest) > 0 {
		return parts, damaged("%d bytes follow it", len(rest))
	}
	return parts, nil
}

// checkSum checks the checksum of an encoding, which is long enough.
func checkSum(b []byte) error {
	body := len(b) - sha256.Size
	if sum := sha256.Sum256(b[:body]); !bytes.Equal(sum[:], b[body:]) {
		return damaged("wrong checksum")
	}
	return nil
}

// section cuts the first section off b.
func section(b []byte) (part, rest []byte, err error) {
	n, size := binary.Uvarint(b)
	if size <= 0 || n > uint64(len(b)-size) {
		return nil, nil, damaged("section of %d bytes", n)
	}
	return b[size:][:n:n], b[size+int(n):], nil
}

// setNumbers decodes what numbers encodes.
func (x *Index) setNumbers(b []byte) (err error) {
	var numbers [8]uint64
	for i := range numbers {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > 1<<62 {
			return damaged("malformed number")
		}
		numbers[i], b = n, b[size:]
	}
	if numbers[0] >= uint64(len(compressions)) || numbers[6] > flagOpaque || numbers[7] > math.MaxInt32 ||
		len(b) < checksum.Size {
		return damaged("malformed numbers")
	}
	x.Kind, x.BlobSize, x.TarSize = Compression(numbers[0]), int64(numbers[1]), int64(numbers[2])
	x.DataSize = int64(numbers[3])
	x.Summary = Summary{
		Bytes: numbers[4], Inodes: numbers[5], Opaque: numbers[6] == flagOpaque, Whiteouts: int(numbers[7]),
		Sum: checksum.FromBytes([checksum.Size]byte(b))}
	b = b[checksum.Size:]
	for _, d := range []*digest.Digest{&x.Blob, &x.DiffID, &x.TreeDigest, &x.RecordDigest} {
		var text []byte
		if text, b, err = section(b); err != nil {
			return err
		}
		*d = digest.Digest(text)
	}
	if len(b) > 0 {
		return damaged("%d bytes after the numbers", len(b))
	}
	return nil
}

func (x *Index) setStates(b []byte) error {
	const size = len(State{})
	if len(b)%size != 0 || len(b)/size != statesOf(x.BlobSize) {
		return damaged("%d bytes of states of a blob of %d bytes", len(b), x.BlobSize)
	}
	for ; len(b) > 0; b = b[size:] {
		x.States = append(x.States, State(b))
	}
	return nil
}

// decodePoints decodes the points of a whole blob. They share memory with b. The error wraps
// ErrDamaged.
func decodePoints(b []byte) (points []Point, err error) {
	r := NewPointReader(&sharedBytes{bytes.NewReader(b), b})
	for {
		p, err := r.Next()
		if errors.Is(err, io.EOF) {
			return points, nil
		}
		if err != nil {
			return nil, err
		}
		points = append(points, p)
	}
}

// check returns an error that wraps ErrDamaged if the index is inconsistent.
func (x *Index) check() error {
	switch {
	case !isSHA256(x.Blob) || !isSHA256(x.TreeDigest) || !isSHA256(x.RecordDigest) || x.DiffID.Validate() != nil:
		return damaged("digests %q, %q, %q, %q", x.Blob, x.DiffID, x.TreeDigest, x.RecordDigest)
	case x.BlobSize <= 0 || x.TarSize <= 0 || x.DataSize < 0 || int(x.Kind) >= len(compressions):
		return damaged("%s blob of %d bytes with a tar of %d bytes and %d bytes of data", x.Kind, x.BlobSize, x.TarSize, x.DataSize)
	case x.Kind == None && x.BlobSize != x.TarSize:
		return damaged("tar has %d bytes, its blob %d", x.TarSize, x.BlobSize)
	case len(x.States) != statesOf(x.BlobSize):
		return damaged("%d states of %d bytes", len(x.States), x.BlobSize)
	case len(x.Points) == 0:
		return damaged("no points")
	case x.Summary.Whiteouts < 0 || x.Summary.Bytes > 1<<62 || x.Summary.Inodes > 1<<62:
		return damaged("%d bytes on disk, %d inodes, %d whiteouts", x.Summary.Bytes, x.Summary.Inodes, x.Summary.Whiteouts)
	}
	return x.checkPoints()
}

func isSHA256(d digest.Digest) bool { return d.Validate() == nil && d.Algorithm() == digest.SHA256 }

func (x *Index) checkPoints() error {
	var r PointReader
	for i := range x.Points {
		p := &x.Points[i]
		if err := p.check(); err != nil {
			return err
		}
		if err := r.follows(p); err != nil {
			return err
		}
		if x.Kind == None && p.In != p.Out || x.Kind != Gzip && !p.Start {
			return damaged("point at %d of a blob with compression %s", p.In, x.Kind)
		}
		r.last, r.any = *p, true
	}
	last := x.Span(len(x.Points) - 1)
	if last.InSize < 0 || last.OutSize < 0 || tooLong(last.InSize, last.OutSize) {
		return damaged("last span has %d bytes of the blob and %d of the tar", last.InSize, last.OutSize)
	}
	return nil
}
