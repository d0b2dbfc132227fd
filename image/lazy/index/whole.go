package index

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// wholeMagic begins a whole index. Its number changes with the form, and whenever unpack.Pack makes
// other files of the same tar: nodes compare these files with their own (TestOutputOfPack).
const wholeMagic = "berth whole index 1\n"

// MaxHints limits the number of hints in a whole index.
const MaxHints = 4096

// EncodeWhole returns an index with its tree and its record, for another node. hints are numbers of
// spans to fetch first; those beyond MaxHints are left out. The error wraps ErrDamaged.
//
// Four sections follow wholeMagic, each a varint length and its bytes: what Encode returns, the
// tree, the record, and the hints as varints.
func (x *Index) EncodeWhole(hints []int) ([]byte, error) {
	encoded, err := x.Encode()
	if err != nil {
		return nil, err
	}
	var numbers []byte
	for _, i := range hints[:min(len(hints), MaxHints)] {
		numbers = binary.AppendUvarint(numbers, uint64(max(i, 0)))
	}
	parts := [][]byte{encoded, x.Tree, x.Record, numbers}
	size := len(wholeMagic)
	for _, part := range parts {
		size += binary.MaxVarintLen64 + len(part)
	}
	b := append(make([]byte, 0, size), wholeMagic...)
	for _, part := range parts {
		b = binary.AppendUvarint(b, uint64(len(part)))
		b = append(b, part...)
	}
	return b, nil
}

// ErrOtherVersion is wrapped by the error about a whole index of another version of berth.
var ErrOtherVersion = errors.New("index of another version")

// Bounds limit an index of another node. What it says of the layer's size costs memory and time
// before the layer is proven.
type Bounds struct{ Tar, Data int64 }

// check returns how many points an index may have.
func (b Bounds) check(x *Index) (points int64, err error) {
	if x.TarSize > b.Tar || x.DataSize > b.Data {
		return 0, damaged("a tar of %d bytes and %d bytes of data; %d and %d are possible", x.TarSize, x.DataSize, b.Tar, b.Data)
	}
	return 64 + x.TarSize/Grid, nil // a Recorder makes fewer
}

// DecodeWhole returns what EncodeWhole has encoded. Tree and Record share memory with b. The index
// is consistent but may be false: see the package's contract. Hints that are no spans are left out.
// The error wraps ErrDamaged.
func DecodeWhole(b []byte, within Bounds) (x *Index, hints []int, err error) {
	rest, ok := bytes.CutPrefix(b, []byte(wholeMagic))
	if !ok {
		return nil, nil, fmt.Errorf("%w: %w", ErrOtherVersion, damaged("unknown form of a whole index"))
	}
	var parts [4][]byte
	for i := range parts {
		if parts[i], rest, err = section(rest); err != nil {
			return nil, nil, err
		}
	}
	if len(rest) > 0 {
		return nil, nil, damaged("%d bytes follow it", len(rest))
	}
	if x, err = decode(bytes.Clone(parts[0]), within.check); err != nil { // the points stay longer than tree and record
		return nil, nil, err
	}
	if err := x.SetFiles(parts[1], parts[2]); err != nil {
		return nil, nil, err
	}
	hints, err = decodeHints(parts[3], x.Spans())
	return x, hints, err
}

// decodeHints decodes numbers below a limit.
func decodeHints(b []byte, spans int) (hints []int, err error) {
	for len(b) > 0 {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > math.MaxInt32 || len(hints) == MaxHints {
			return nil, damaged("malformed hints")
		}
		b = b[size:]
		if int(n) < spans {
			hints = append(hints, int(n))
		}
	}
	return hints, nil
}
