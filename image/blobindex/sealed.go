package blobindex

import (
	"bytes"
	"crypto/sha256"
	"fmt"
)

// sealedMagic begins an encoded index with seals. Its number is the version of the format.
const sealedMagic = "berth sealed index 1\n"

// Seal is the SHA-256 of a span's bytes in the blob. They begin with the byte before In if the
// point has Bits. If a span has no bytes of the tar, its Seal is zero, and it is never
// decompressed.
type Seal [sha256.Size]byte

// Sealed reports whether the index has a Seal for each span. It is also an index of chunks, but its
// chunks have no digests, and its points may have a Window and Bits. The Byte of its points is
// zero. Opened returns the true Byte.
func (x *Index) Sealed() bool { return len(x.Seals) > 0 }

// Opened verifies the bytes of a span in the blob, which GridRange describes. It returns the point
// with its Byte, and the bytes from In on. The error wraps ErrMismatch if the bytes are wrong.
func (x *Index) Opened(i int, raw []byte) (Point, []byte, error) {
	p := x.Points[i]
	if seal := x.Seals[i]; seal != (Seal{}) && sha256.Sum256(raw) != seal {
		return p, nil, fmt.Errorf("%w %s: span at %d", ErrMismatch, x.Blob, p.In)
	}
	if p.Bits > 0 {
		p.Byte, raw = raw[0]&^(0xff>>p.Bits), raw[1:]
	}
	return p, raw, nil
}

// sealedPoints encodes points with their seals.
func (x *Index) sealedPoints() []byte {
	b := make([]byte, 0, x.sizeOfPoints()+len(x.Seals)*sha256.Size)
	for i := range x.Points {
		b = append(AppendPoint(b, &x.Points[i]), x.Seals[i][:]...)
	}
	return b
}

// setSealedPoints decodes what sealedPoints encodes. The windows share memory with b.
func (x *Index) setSealedPoints(b []byte) error {
	in := &sharedBytes{bytes.NewReader(b), b}
	for in.Len() > 0 {
		p, err := ReadPoint(in)
		if err != nil {
			return err
		}
		seal, err := in.next(sha256.Size)
		if err != nil {
			return damaged("a seal ends too soon")
		}
		x.Points, x.Seals = append(x.Points, p), append(x.Seals, Seal(seal))
	}
	if !x.Sealed() {
		return damaged("no seals")
	}
	return nil
}

// checkSeal checks the point and the seal of a span.
func (x *Index) checkSeal(i int) error {
	if !x.Sealed() {
		return nil
	}
	p := &x.Points[i]
	if err := p.check(); err != nil {
		return err
	}
	if p.Byte != 0 || x.Seals[i] == (Seal{}) && x.Span(i).OutSize > 0 {
		return damaged("point at %d with the byte %#x, or without a seal", p.In, p.Byte)
	}
	return nil
}
