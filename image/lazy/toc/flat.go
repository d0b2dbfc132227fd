package toc

import (
	"encoding/binary"
	"math"
)

// flat reads a flatbuffer (https://flatbuffers.dev/internals). It does not trust the buffer. After
// the first offset outside of the buffer it returns zero values, and err wraps ErrMalformed.
type flat struct {
	b   []byte
	err error
	// left limits the bytes of all strings and elements, because a buffer can refer to the same
	// string many times.
	left int
}

func newFlat(b []byte) *flat { return &flat{b: b, left: 2 * len(b)} }

// flatTable is a table in a flatbuffer. The zero flatTable has no fields.
type flatTable struct {
	f      *flat
	at     int
	fields []byte // two bytes for each field: its offset from at, 0 if it is absent
}

// flatVector is a vector in a flatbuffer.
type flatVector struct {
	f     *flat
	at, n int
}

// bytes returns n bytes at an offset.
func (f *flat) bytes(at, n int) []byte {
	if f.err == nil && (at < 0 || n < 0 || at > len(f.b) || n > len(f.b)-at) {
		f.err = malformed("%d bytes at %d of a flatbuffer of %d", n, at, len(f.b))
	}
	if f.err != nil {
		return nil
	}
	return f.b[at:][:n:n]
}

// number returns an unsigned number of some bytes.
func (f *flat) number(at, size int) (n uint64) {
	var full [8]byte
	copy(full[:], f.bytes(at, size))
	return binary.LittleEndian.Uint64(full[:])
}

// follow returns the place that an offset at a place refers to.
func (f *flat) follow(at int) int { return at + int(f.number(at, 4)) }

// table returns the table at a place.
func (f *flat) table(at int) flatTable {
	shape := at - int(int32(f.number(at, 4))) //nolint:gosec // it is a signed number
	size := int(f.number(shape, 2))
	if f.err == nil && size < 4 {
		f.err = malformed("a shape of %d bytes", size)
	}
	return flatTable{f, at, f.bytes(shape+4, size-4)}
}

// root returns the root of the buffer.
func (f *flat) root() flatTable { return f.table(f.follow(0)) }

// field returns the place of a field; ok is false if it is absent.
func (t flatTable) field(i int) (at int, ok bool) {
	if 2*i+2 > len(t.fields) {
		return 0, false
	}
	offset := int(binary.LittleEndian.Uint16(t.fields[2*i:]))
	return t.at + offset, offset != 0
}

// number returns an unsigned number of some bytes; absent is the result if the field is absent.
func (t flatTable) number(i, size int, absent uint64) uint64 {
	if at, ok := t.field(i); ok {
		return t.f.number(at, size)
	}
	return absent
}

// int64 returns a number of eight bytes.
func (t flatTable) int64(i int) int64 { return int64(t.number(i, 8, 0)) } //nolint:gosec // it is a signed number

// table returns a table that a field refers to.
func (t flatTable) table(i int) flatTable {
	if at, ok := t.field(i); ok {
		return t.f.table(t.f.follow(at))
	}
	return flatTable{}
}

// vector returns the vector that field i refers to. Its elements have size bytes each.
func (t flatTable) vector(i, size int) flatVector {
	at, ok := t.field(i)
	if !ok {
		return flatVector{}
	}
	at = t.f.follow(at)
	n := t.f.number(at, 4)
	if t.f.bytes(at+4, int(min(n, math.MaxInt32))*size) == nil {
		return flatVector{}
	}
	return flatVector{t.f, at + 4, int(n)}
}

// string returns the string to which a field or an element of a vector refers.
func (t flatTable) string(i int) string {
	if at, ok := t.field(i); ok {
		return t.f.string(at)
	}
	return ""
}

func (f *flat) string(at int) string {
	at = f.follow(at)
	b := f.bytes(at+4, int(min(f.number(at, 4), math.MaxInt32)))
	if f.spend(len(b)); f.err != nil {
		return ""
	}
	return string(b)
}

func (f *flat) spend(n int) {
	if f.left -= n; f.err == nil && f.left < 0 {
		f.err = malformed("a flatbuffer repeats its content")
	}
}

// bytes returns a vector of bytes.
func (v flatVector) bytes() []byte {
	if v.f == nil {
		return nil
	}
	return v.f.bytes(v.at, v.n)
}

// string returns an element of a vector of strings.
func (v flatVector) string(i int) string { return v.f.string(v.at + 4*i) }

// table returns an element of a vector of tables.
func (v flatVector) table(i int) flatTable {
	v.f.spend(4)
	return v.f.table(v.f.follow(v.at + 4*i))
}
