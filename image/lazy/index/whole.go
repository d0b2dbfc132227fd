package index

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/opencontainers/go-digest"
)

// wholeMagic begins a whole index. Its number changes with the form, and whenever unpack.Pack makes
// other files of the same tar: nodes compare these files with their own (TestOutputOfPack).
const wholeMagic = "berth whole index 1\n"

// MaxHints limits the number of hints in a whole index.
const MaxHints = 4096

// EncodeWhole returns a whole index in memory. hints are numbers of spans to fetch first; those
// beyond MaxHints are left out. The error wraps ErrDamaged. See OpenWhole for one from files.
func (x *Index) EncodeWhole(hints []int) ([]byte, error) {
	encoded, err := x.Encode()
	if err != nil {
		return nil, err
	}
	w := newWhole(inMemory(encoded), inMemory(x.Tree), inMemory(x.Record), hints)
	b := make([]byte, w.Size())
	_, err = w.ReadAt(b, 0)
	return b, err
}

// Whole is an index with its tree and its record, for another node. It is read from its parts. The
// caller may read it as long as the parts.
//
// Four sections follow wholeMagic, each a varint length and its bytes: what Encode returns, the
// tree, the record, and the hints as varints.
type Whole struct {
	Blob   digest.Digest
	DiffID digest.Digest

	parts []*io.SectionReader
	size  int64
}

// OpenWhole returns a whole index that is read from its files: what Encode has returned, the tree
// and the record. It reads each of them once to compare all digests, and keeps none in memory. The
// error wraps ErrDamaged if they do not belong together, or is that of a reader.
func OpenWhole(encoded, tree, record *io.SectionReader, hints []int) (*Whole, error) {
	x, err := readNumbers(encoded)
	if err != nil {
		return nil, err
	}
	for _, f := range []struct {
		from *io.SectionReader
		want digest.Digest
	}{{tree, x.TreeDigest}, {record, x.RecordDigest}} {
		got, err := digest.SHA256.FromReader(io.NewSectionReader(f.from, 0, f.from.Size()))
		if err != nil {
			return nil, err
		}
		if got != f.want {
			return nil, damaged("another tree or record")
		}
	}
	w := newWhole(encoded, tree, record, hints)
	w.Blob, w.DiffID = x.Blob, x.DiffID
	return w, nil
}

// maxHead is more than magic and the section of the numbers take.
const maxHead = 4 * roomForNumbers

// readNumbers returns what the first section of an encoded index says. It compares the checksum.
func readNumbers(encoded *io.SectionReader) (*Index, error) {
	body := encoded.Size() - sha256.Size
	if encoded.Size() > MaxEncoded || body < int64(len(magic)) {
		return nil, damaged("%d bytes", encoded.Size())
	}
	head := make([]byte, min(body, maxHead))
	if _, err := encoded.ReadAt(head, 0); err != nil {
		return nil, err
	}
	rest, ok := bytes.CutPrefix(head, []byte(magic))
	if !ok {
		return nil, damaged("unknown format")
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(encoded, 0, body)); err != nil {
		return nil, err
	}
	sum := make([]byte, sha256.Size)
	if _, err := encoded.ReadAt(sum, body); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if !bytes.Equal(h.Sum(nil), sum) {
		return nil, damaged("wrong checksum")
	}
	numbers, _, err := section(rest)
	if err != nil {
		return nil, err
	}
	x := &Index{}
	return x, x.setNumbers(numbers)
}

// newWhole joins the parts.
func newWhole(encoded, tree, record *io.SectionReader, hints []int) *Whole {
	var numbers []byte
	for _, i := range hints[:min(len(hints), MaxHints)] {
		numbers = binary.AppendUvarint(numbers, uint64(max(i, 0)))
	}
	w := &Whole{}
	w.add(inMemory([]byte(wholeMagic)))
	for _, part := range []*io.SectionReader{encoded, tree, record, inMemory(numbers)} {
		w.add(inMemory(binary.AppendUvarint(nil, uint64(part.Size()))))
		w.add(part)
	}
	return w
}

func (w *Whole) add(part *io.SectionReader) {
	w.parts = append(w.parts, part)
	w.size += part.Size()
}

func inMemory(b []byte) *io.SectionReader {
	return io.NewSectionReader(bytes.NewReader(b), 0, int64(len(b)))
}

// Size returns the length of the whole index in bytes.
func (w *Whole) Size() int64 { return w.size }

// ReadAt implements io.ReaderAt.
func (w *Whole) ReadAt(p []byte, offset int64) (n int, err error) {
	if offset < 0 {
		return 0, errors.New("negative offset")
	}
	for _, part := range w.parts {
		if offset >= part.Size() {
			offset -= part.Size()
			continue
		}
		next := p[n:][:min(int64(len(p)-n), part.Size()-offset)]
		m, err := part.ReadAt(next, offset)
		if n += m; m < len(next) {
			if err == nil {
				err = io.ErrUnexpectedEOF
			}
			return n, fmt.Errorf("read a part of an index: %w", err)
		}
		offset = 0
		if n == len(p) {
			return n, nil
		}
	}
	return n, io.EOF
}

// ErrOtherVersion is wrapped by the error about a whole index of another version of berth.
var ErrOtherVersion = errors.New("index of another version")

// Bounds limit an index of another node. What it says of the layer's size costs memory and time
// before the layer is proven.
type Bounds struct {
	Tar, Data int64
	// Of, if not nil, returns an error if the index is not the one that was asked for. It gets an
	// index with numbers and digests only, before anything else was read.
	Of func(x *Index) error
}

// check returns how many points an index may have.
func (b Bounds) check(x *Index) (points int64, err error) {
	if b.Of != nil {
		if err := b.Of(x); err != nil {
			return 0, err
		}
	}
	if x.TarSize > b.Tar || x.DataSize > b.Data {
		return 0, damaged("a tar of %d bytes and %d bytes of data; %d and %d are possible", x.TarSize, x.DataSize, b.Tar, b.Data)
	}
	return 64 + x.TarSize/Grid, nil // a Recorder makes fewer
}

// DecodeWhole returns what EncodeWhole has encoded. Tree and Record share memory with b. The index
// is consistent but may be false: see the package's contract. Hints that are no spans are left out.
// The error wraps ErrDamaged, or is that of within.Of.
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
	if x, err = decode(parts[0], within.check); err != nil {
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
