package blobindex

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/opencontainers/go-digest"
)

// magic begins an encoded index. Its number is the version of the format.
const magic = "berth blob index 1\n"

// MaxEncoded is the longest encoding of an index, in bytes.
const MaxEncoded = 64 << 20

const flagOpaque = 1

// Encode returns the encoding of an index, without Tree and Record. The error wraps ErrDamaged if
// the index is inconsistent or too large.
func (x *Index) Encode() ([]byte, error) {
	if x.OfChunks() {
		return x.encodeChunks()
	}
	if err := x.check(); err != nil {
		return nil, err
	}
	size := len(magic) + len(x.States)*len(State{}) + sha256.Size + roomForNumbers + x.sizeOfPoints()
	if size > MaxEncoded {
		return nil, damaged("it has about %d bytes", size)
	}
	b := append(make([]byte, 0, size), magic...)
	for _, part := range [][]byte{x.numbers(), x.states(), x.points()} {
		b = binary.AppendUvarint(b, uint64(len(part)))
		b = append(b, part...)
	}
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// Usual sizes of what is not a state or a window.
const (
	roomForNumbers = 1 << 10
	roomForPoint   = 32
)

// numbers encodes all fields of a fixed size.
func (x *Index) numbers() (b []byte) {
	flags := uint64(0)
	if x.Summary.Opaque {
		flags = flagOpaque
	}
	for _, n := range []uint64{uint64(x.Kind), uint64(x.BlobSize), uint64(x.TarSize), uint64(x.DataSize),
		x.Summary.Bytes, x.Summary.Inodes, flags, uint64(x.Summary.Whiteouts)} {
		b = binary.AppendUvarint(b, n)
	}
	b = append(b, x.Summary.Sum.Bytes()...)
	for _, d := range []digest.Digest{x.Blob, x.DiffID, x.TreeDigest, x.RecordDigest} {
		b = binary.AppendUvarint(b, uint64(len(d)))
		b = append(b, d...)
	}
	return b
}

func (x *Index) states() []byte {
	b := make([]byte, 0, len(x.States)*len(State{}))
	for i := range x.States {
		b = append(b, x.States[i][:]...)
	}
	return b
}

// sizeOfPoints returns about the length of points.
func (x *Index) sizeOfPoints() (size int) {
	for i := range x.Points {
		size += len(x.Points[i].Window) + roomForPoint
	}
	return size
}

func (x *Index) points() []byte {
	b := make([]byte, 0, x.sizeOfPoints())
	for i := range x.Points {
		b = AppendPoint(b, &x.Points[i])
	}
	return b
}
