package hostile

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"hash/crc32"
	"io"
	"testing"

	"berth/integration/harness"
)

// unit is an instruction of the quine, five bytes long.
type unit [5]byte

// literal returns a stored block of the n units that follow it.
func literal(n byte) unit { return unit{0, 5 * n, 0, ^(5 * n), 0xff} }

// repeat returns a block that repeats the last four units: twice ten bytes from a distance of
// twenty bytes. Its fixed codes (RFC 1951, section 3.2.6) have 40 bits.
func repeat() unit {
	var bits uint64
	n := 0
	put := func(value, width int) { // codes begin with the most significant bit
		for i := width - 1; i >= 0; i-- {
			bits |= uint64(value>>i&1) << n
			n++
		}
	}
	put(0, 1) // not the last block
	put(2, 2) // fixed codes: 01, low bit first
	for range 2 {
		put(264-256, 7) // length 10
		put(8, 5)       // distance 17 to 24: the next three bits, lowest first, are added
		put(6, 3)       // 3, lowest bit first
	}
	put(0, 7) // end of the block
	var u unit
	for i := range u {
		u[i] = byte(bits >> (8 * i))
	}
	return u
}

// quine returns a gzip file that inflates to itself, so recursive inflation never ends. It is a
// program of two instructions that prints itself, after R. Cox, "Zip Files All The Way Down"
// (2010).
func quine(t *testing.T) []byte {
	t.Helper()
	l0, l1, l4, r4 := literal(0), literal(1), literal(4), repeat()
	// Head and tail have three units each. Each is printed together with the units before or after
	// it, and then repeated. The tail contains the end of the compressed data, checksum and length.
	head := []unit{{0x1f, 0x8b, 8, 8, 0}, {0, 0, 0, 0, 255}, {'q', 'u', 'i', 'n', 0}}
	tail := []unit{l0, {3, 0}, {}}
	var program []unit
	add := func(units ...unit) { program = append(program, units...) }
	add(head...)
	add(l4)
	add(head...)
	add(l4, r4, l1, r4, l1, l1, l4, r4, l1, l1, l4, r4, l4, r4, l4, r4, l4, r4, l4, r4, l0, l0, l4, r4, l0, l0, l4, r4)
	first := 5*len(program) + 7
	add(tail...)
	add(r4)
	second := 5*len(program) + 7
	add(tail...)
	var file []byte
	for _, u := range program {
		file = append(file, u[:]...)
	}
	with := func(sum uint32) uint32 {
		for _, at := range []int{first, second} {
			binary.LittleEndian.PutUint32(file[at:], sum)
			binary.LittleEndian.PutUint32(file[at+4:], uint32(len(file)))
		}
		return crc32.ChecksumIEEE(file)
	}
	with(fixpoint(t, with))
	return file
}

// fixpoint finds x with f(x) = x. f must be affine over GF(2): each bit of f(x) is the sum, modulo
// 2, of a constant and some bits of x.
func fixpoint(t *testing.T, f func(uint32) uint32) uint32 {
	t.Helper()
	// This is Gaussian elimination. Column i contains the bits of f(x) - x that bit i of x changes.
	// Bit 32 of each row is the right side.
	constant := f(0)
	var rows [32]uint64
	for i := range 32 {
		column := f(1<<i) ^ constant ^ 1<<i
		for j := range 32 {
			rows[j] |= uint64(column>>j&1) << i
		}
	}
	for j := range rows {
		rows[j] |= uint64(constant>>j&1) << 32
	}
	for i := range 32 {
		pivot := i
		for pivot < 32 && rows[pivot]>>i&1 == 0 {
			pivot++
		}
		if pivot == 32 {
			t.Fatal("no checksum is a fixed point; change the name in the head")
		}
		rows[i], rows[pivot] = rows[pivot], rows[i]
		for j := range rows {
			if j != i && rows[j]>>i&1 == 1 {
				rows[j] ^= rows[i]
			}
		}
	}
	x := uint32(0)
	for i, row := range rows {
		x |= uint32(row>>32&1) << i
	}
	return x
}

func TestQuineUnpacksToItself(t *testing.T) {
	file := quine(t)
	z := harness.Get(gzip.NewReader(bytes.NewReader(file)))(t)
	inflated, err := io.ReadAll(z)
	if err != nil || !bytes.Equal(inflated, file) {
		t.Errorf("%x\ninflates to %v\n%x", file, err, inflated)
	}
}
