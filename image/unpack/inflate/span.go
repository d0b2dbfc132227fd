package inflate

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"fmt"
	"io"

	"berth/image/blobindex"
	"berth/image/unpack/isal"
)

// spanBuffer is how much of a span is buffered.
const spanBuffer = 64 << 10

// Span decompresses from a point of a blob until out is full. in is the verified blob from p.In on,
// to the end of the span or further. window limits the memory for zstd. Errors are CorruptErrors.
// The checksum of a gzip member is not verified if the point is inside the member.
func Span(kind blobindex.Compression, p *blobindex.Point, in, out []byte, window int64) error {
	var err error
	switch kind {
	case blobindex.None:
		if copy(out, in) < len(out) {
			err = io.ErrUnexpectedEOF
		}
	case blobindex.Zstd:
		err = spanOfZstd(in, out, window)
	case blobindex.Gzip:
		err = spanOfGzip(p, in, out)
	default:
		err = fmt.Errorf("unknown %s", kind)
	}
	if err != nil {
		return &CorruptError{err}
	}
	return nil
}

func spanOfZstd(in, out []byte, window int64) error {
	z, err := openZstd(bytes.NewReader(in), min(window, MaxWindow))
	if err != nil {
		return err
	}
	defer z.Close()
	_, err = io.ReadFull(z, out)
	return err
}

func spanOfGzip(p *blobindex.Point, in, out []byte) error {
	dictionary, err := p.Dictionary()
	if err != nil {
		return err
	}
	if !isal.Works() {
		return spanByGo(p, dictionary, in, out)
	}
	r, err := isal.NewReaderAt(bufio.NewReaderSize(bytes.NewReader(in), spanBuffer), p, dictionary)
	if err != nil {
		return err
	}
	_, err = io.ReadFull(r, out)
	return errors.Join(err, r.Close())
}

// spanByGo is spanOfGzip without ISA-L.
func spanByGo(p *blobindex.Point, dictionary, in, out []byte) error {
	if p.Start {
		return membersByGo(in, out)
	}
	first := aligned(p)
	blob := bytes.NewReader(in) // package flate does not read an io.ByteReader beyond the last block
	n, err := io.ReadFull(flate.NewReaderDict(&joined{first, blob}, dictionary), out)
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	const trailer = 8
	if blob.Len() < trailer {
		return io.ErrUnexpectedEOF
	}
	return membersByGo(in[len(in)-blob.Len()+trailer:], out[n:])
}

// membersByGo decompresses members until out is full.
func membersByGo(in, out []byte) error {
	r, err := gzip.NewReader(bufio.NewReaderSize(bytes.NewReader(in), spanBuffer))
	if err != nil {
		return err
	}
	_, err = io.ReadFull(r, out)
	return err
}

// joined reads bytes, and then a reader.
type joined struct {
	first []byte
	rest  *bytes.Reader
}

// ReadByte implements io.ByteReader.
func (j *joined) ReadByte() (byte, error) {
	if len(j.first) == 0 {
		return j.rest.ReadByte()
	}
	b := j.first[0]
	j.first = j.first[1:]
	return b, nil
}

// Read implements io.Reader.
func (j *joined) Read(p []byte) (int, error) {
	if len(j.first) == 0 {
		return j.rest.Read(p)
	}
	n := copy(p, j.first)
	j.first = j.first[n:]
	return n, nil
}

// aligned returns whole bytes that end with the bits of a point. They begin with blocks that have
// no content, because package flate cannot begin inside a byte. Shifting all bits is not possible,
// because stored blocks begin at whole bytes.
func aligned(p *blobindex.Point) []byte {
	var b bitString
	if p.Bits%2 == 1 {
		b.addDynamicBlock()
	}
	for (b.n+int(p.Bits))%8 != 0 {
		b.addFixedBlock()
	}
	b.add(uint64(p.Byte)>>(8-p.Bits), int(p.Bits))
	return b.bytes
}

// bitString is a sequence of bits as deflate orders them, the least significant first.
type bitString struct {
	bytes []byte
	n     int // bits
}

// add appends bits of a number.
func (b *bitString) add(value uint64, bits int) {
	for i := range bits {
		if b.n%8 == 0 {
			b.bytes = append(b.bytes, 0)
		}
		b.bytes[b.n/8] |= byte(value>>i&1) << (b.n % 8)
		b.n++
	}
}

// addFixedBlock appends a block with fixed codes and no content, which has 10 bits (RFC 1951,
// section 3.2.6).
func (b *bitString) addFixedBlock() {
	b.add(0, 1) // not the last block
	b.add(1, 2) // fixed codes
	b.add(0, 7) // end of block
}

// addDynamicBlock appends a block with codes of its own and no content, which has 93 bits (RFC
// 1951, section 3.2.7). It has one length code, for the end of the block, and one distance code.
func (b *bitString) addDynamicBlock() {
	b.add(0, 1)  // not the last block
	b.add(2, 2)  // codes of its own
	b.add(0, 10) // 257 lengths and one distance
	b.add(15, 4) // 19 code lengths follow, in the order 16, 17, 18, 0, ... 1, 15
	for i := range 19 {
		used := uint64(0)
		if i == 2 || i == 17 { // 18: many zeros, and 1
			used = 1
		}
		b.add(used, 3)
	}
	for _, zeros := range []uint64{138, 118} {
		b.add(1, 1) // the code of 18
		b.add(zeros-11, 7)
	}
	b.add(0, 2) // the length 1 twice: for the block's end and for the distance
	b.add(0, 1) // the block's end
}
