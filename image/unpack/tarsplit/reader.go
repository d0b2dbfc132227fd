package tarsplit

import (
	"bytes"
	"compress/flate" // the standard library's implementation is memory-safe
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync/atomic"
)

// Content reads the content of files of a layer.
type Content interface {
	// ReadContent fills p with the content at a place, starting at an offset from there. It returns
	// an error if it could not fill p.
	ReadContent(at Ref, p []byte, offset int64) error
}

// Reader restores a tar. It is safe for concurrent use.
type Reader struct {
	file    io.ReaderAt
	content Content
	size    int64
	blocks  []block

	last atomic.Pointer[decoded] // the last block that was used
}

// block is the place of a block in the record.
type block struct {
	offset     int64 // of its data in the record
	start      int64 // in the tar
	raw        int
	compressed int64
}

// decoded is a decoded block.
type decoded struct {
	number     int
	operations []operation
}

// operation is a range of the tar.
type operation struct {
	start, size int64
	kind        uint64
	literal     []byte // for kindLiteral
	at          Ref    // for kindContent
}

// Open opens a record of fileSize bytes of a tar with tarSize bytes. It reads the headers of all
// blocks. The error wraps ErrDamaged if the headers do not fit such a tar.
func Open(file io.ReaderAt, fileSize, tarSize int64, content Content) (*Reader, error) {
	r := &Reader{file: file, content: content, size: tarSize}
	if fileSize > MaxFile {
		return nil, damaged("%d bytes", fileSize)
	}
	head := make([]byte, len(magic))
	if _, err := file.ReadAt(head, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read record of the tar: %w", err)
	}
	if string(head) != magic {
		return nil, damaged("unknown format %q", head)
	}
	start, raw := int64(0), int64(0)
	for offset := int64(len(magic)); offset < fileSize; {
		if n := len(r.blocks); n > 0 && r.blocks[n-1].raw < blockSize {
			return nil, damaged("block %d is short", n-1)
		}
		b, tarBytes, err := readHeader(file, offset, fileSize)
		if err != nil {
			return nil, err
		}
		if raw += int64(b.raw); raw > maxRaw {
			return nil, damaged("more than %d bytes of operations", maxRaw)
		}
		b.start = start
		r.blocks = append(r.blocks, b)
		offset = b.offset + b.compressed
		if start += tarBytes; tarBytes <= 0 || start > tarSize {
			return nil, damaged("block %d covers %d bytes", len(r.blocks), tarBytes)
		}
	}
	if start != tarSize {
		return nil, damaged("%d of %d bytes", start, tarSize)
	}
	return r, nil
}

func damaged(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrDamaged, fmt.Sprintf(format, args...))
}

// readHeader reads the header of a block.
func readHeader(file io.ReaderAt, offset, fileSize int64) (b block, tarBytes int64, err error) {
	var buf [3 * binary.MaxVarintLen64]byte
	n, err := file.ReadAt(buf[:], offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return b, 0, fmt.Errorf("read record of the tar: %w", err)
	}
	rest := buf[:n]
	var numbers [3]uint64
	for i := range numbers {
		if numbers[i], rest, err = number(rest); err != nil {
			return b, 0, err
		}
	}
	b = block{offset: offset + int64(n-len(rest)), raw: int(numbers[0]), compressed: int64(numbers[1])}
	if numbers[0] == 0 || numbers[0] > maxBlock || numbers[1] > uint64(fileSize-b.offset) {
		return b, 0, damaged("block of %d and %d bytes", numbers[0], numbers[1])
	}
	return b, int64(numbers[2]), nil
}

// number decodes a number that is not larger than the size of any file.
func number(p []byte) (n uint64, rest []byte, err error) {
	n, size := binary.Uvarint(p)
	if size <= 0 || n > 1<<62 {
		return 0, nil, damaged("malformed number")
	}
	return n, p[size:], nil
}

// Size returns the length of the tar in bytes.
func (r *Reader) Size() int64 { return r.size }

// ReadAt implements io.ReaderAt for the tar. Errors of the content are returned unchanged.
func (r *Reader) ReadAt(p []byte, offset int64) (n int, err error) {
	if offset < 0 {
		return 0, errors.New("negative offset")
	}
	for n < len(p) {
		if offset >= r.size {
			return n, io.EOF
		}
		b, err := r.blockAt(offset)
		if err != nil {
			return n, err
		}
		m, err := b.read(r.content, p[n:], offset)
		n += m
		offset += int64(m)
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// Contents calls do for each range of the tar that is the content of a file, in the order of the
// tar. It returns the first error of do. The error wraps ErrDamaged if the record cannot be
// decoded.
func (r *Reader) Contents(do func(offset, size int64, at Ref) error) error {
	for i := range r.blocks {
		end := r.size
		if i+1 < len(r.blocks) {
			end = r.blocks[i+1].start
		}
		b, err := r.decode(i, end)
		if err != nil {
			return fmt.Errorf("block %d: %w", i, err)
		}
		for _, op := range b.operations {
			if op.kind != kindContent {
				continue
			}
			if err := do(op.start, op.size, op.at); err != nil {
				return err
			}
		}
	}
	return nil
}

// blockAt returns the block with a byte of the tar.
func (r *Reader) blockAt(offset int64) (*decoded, error) {
	number := sort.Search(len(r.blocks), func(i int) bool { return r.blocks[i].start > offset }) - 1
	if b := r.last.Load(); b != nil && b.number == number {
		return b, nil
	}
	end := r.size
	if number+1 < len(r.blocks) {
		end = r.blocks[number+1].start
	}
	b, err := r.decode(number, end)
	if err != nil {
		return nil, fmt.Errorf("block %d: %w", number, err)
	}
	r.last.Store(b)
	return b, nil
}

// decode reads a block, which ends at a position of the tar.
func (r *Reader) decode(number int, end int64) (*decoded, error) {
	b := r.blocks[number]
	in := flate.NewReader(io.NewSectionReader(r.file, b.offset, b.compressed))
	raw := make([]byte, b.raw)
	if _, err := io.ReadFull(in, raw); err != nil {
		var corrupt flate.CorruptInputError
		if errors.As(err, &corrupt) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, damaged("%v", err)
		}
		return nil, err
	}
	d := &decoded{number: number}
	at := b.start
	for len(raw) > 0 {
		op, rest, err := nextOperation(raw)
		if err != nil {
			return nil, err
		}
		op.start, raw = at, rest
		at += op.size
		if at > end {
			break
		}
		d.operations = append(d.operations, op)
	}
	if at != end {
		return nil, damaged("it covers other bytes than its header says")
	}
	return d, nil
}

// nextOperation decodes the first operation.
func nextOperation(raw []byte) (op operation, rest []byte, err error) {
	n, rest, err := number(raw)
	if err != nil {
		return op, nil, err
	}
	op.kind = n & (1<<kindBits - 1)
	op.size = int64(n >> kindBits)
	switch {
	case op.size == 0 || op.kind > kindContent:
		return op, nil, damaged("unknown or empty operation")
	case op.kind == kindZeros:
		return op, rest, nil
	case op.kind == kindLiteral:
		if op.size > int64(len(rest)) {
			return op, nil, damaged("%d bytes of %d", len(rest), op.size)
		}
		op.literal = rest[:op.size]
		return op, rest[op.size:], nil
	}
	place, rest, err := number(rest)
	if err != nil {
		return op, nil, err
	}
	if place > 0 {
		op.at.Offset = int64(place - 1)
		return op, rest, nil
	}
	length, rest, err := number(rest)
	if err != nil {
		return op, nil, err
	}
	if length == 0 || length > maxName || length > uint64(len(rest)) || bytes.IndexByte(rest[:length], 0) >= 0 {
		return op, nil, damaged("malformed name")
	}
	op.at.Name = string(rest[:length])
	return op, rest[length:], nil
}

// read copies bytes of the tar from an offset in the block, at most to the block's end.
func (d *decoded) read(content Content, p []byte, offset int64) (n int, err error) {
	i := sort.Search(len(d.operations), func(i int) bool { return d.operations[i].start > offset }) - 1
	for ; i < len(d.operations) && n < len(p); i++ {
		op := d.operations[i]
		within := offset - op.start
		part := p[n:min(len(p), n+int(min(op.size-within, int64(len(p)))))]
		switch op.kind {
		case kindLiteral:
			copy(part, op.literal[within:])
		case kindZeros:
			clear(part)
		default:
			if err := content.ReadContent(op.at, part, within); err != nil {
				return n, err
			}
		}
		n += len(part)
		offset += int64(len(part))
	}
	return n, nil
}
