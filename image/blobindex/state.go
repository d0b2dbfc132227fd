package blobindex

import (
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"fmt"
	"hash"

	"github.com/opencontainers/go-digest"
)

// State is the state of a SHA-256 after a multiple of its block size.
type State [sha256.Size]byte

// The binary form of a crypto/sha256 hash has four parts: this text, the state, the incomplete
// block, and the length.
const (
	hashMagic  = "sha\x03"
	hashBinary = len(hashMagic) + sha256.Size + sha256.BlockSize + 8
)

// stateOf returns the state of a SHA-256 of crypto/sha256.
func stateOf(h hash.Hash) (s State, err error) {
	m, ok := h.(encoding.BinaryAppender)
	if !ok {
		return s, fmt.Errorf("%T does not give its state", h)
	}
	b, err := m.AppendBinary(make([]byte, 0, hashBinary))
	if err != nil {
		return s, err
	}
	if len(b) != hashBinary || string(b[:len(hashMagic)]) != hashMagic {
		return s, fmt.Errorf("%T gives a state of %d bytes", h, len(b))
	}
	return State(b[len(hashMagic):]), nil
}

// hashFrom returns a SHA-256 that continues after n bytes.
func hashFrom(s State, n int64) (hash.Hash, error) {
	b := append([]byte(hashMagic), s[:]...)
	b = append(b, make([]byte, sha256.BlockSize)...)
	b = binary.BigEndian.AppendUint64(b, uint64(n))
	h := sha256.New()
	u, ok := h.(encoding.BinaryUnmarshaler)
	if !ok {
		return nil, fmt.Errorf("%T takes no state", h)
	}
	return h, u.UnmarshalBinary(b)
}

// Hash is a SHA-256 that notes its states.
type Hash struct {
	hash.Hash
	states []State
	left   int // bytes until the next state
	err    error
}

// NewHash returns a Hash for a blob.
func NewHash() *Hash { return &Hash{Hash: sha256.New(), left: Grid} }

// Write implements io.Writer. It never fails.
func (h *Hash) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) >= h.left {
		h.Hash.Write(p[:h.left])
		p = p[h.left:]
		h.left = Grid
		h.note()
	}
	h.Hash.Write(p)
	h.left -= len(p)
	return n, nil
}

func (h *Hash) note() {
	s, err := stateOf(h.Hash)
	if err != nil {
		h.err = err
		return
	}
	h.states = append(h.states, s)
}

// Reset implements hash.Hash.
func (h *Hash) Reset() {
	h.Hash.Reset()
	h.states, h.left, h.err = nil, Grid, nil
}

// States returns the states of a complete blob of size bytes, as an Index has them.
func (h *Hash) States(size int64) ([]State, error) {
	if h.err != nil {
		return nil, fmt.Errorf("states of the blob's hash: %w", h.err)
	}
	n := statesOf(size)
	if len(h.states) < n {
		return nil, fmt.Errorf("states of the blob's hash: %d of %d", len(h.states), n)
	}
	return h.states[:n:n], nil
}

// statesOf returns the number of states of a blob. There is no state at its start and at its end.
func statesOf(size int64) int { return int(max(size-1, 0) / Grid) }

// Verify checks that p are the bytes of the blob at an offset. The offset is on the grid, and the
// end is on the grid or is the blob's end. The error wraps ErrMismatch if the bytes are wrong. For
// an index of chunks, Verify accepts all bytes: see VerifySpan.
func (x *Index) Verify(offset int64, p []byte) error {
	if x.OfChunks() {
		return nil
	}
	end := offset + int64(len(p))
	if offset < 0 || offset%Grid != 0 || end > x.BlobSize || end%Grid != 0 && end != x.BlobSize {
		return fmt.Errorf("verify bytes %d to %d of %s: the range is not on the grid", offset, end, x.Blob)
	}
	if len(p) == 0 {
		return nil
	}
	h, err := x.hashAt(offset)
	if err != nil {
		return err
	}
	h.Write(p)
	return x.compare(h, end)
}

// compare compares the hash of the bytes before an offset with the state there, or with the digest
// at the blob's end.
func (x *Index) compare(h hash.Hash, offset int64) error {
	if offset == x.BlobSize {
		if digest.NewDigest(digest.SHA256, h) != x.Blob {
			return x.mismatch(offset)
		}
		return nil
	}
	got, err := stateOf(h)
	if err != nil {
		return err
	}
	if want, ok := x.state(offset); !ok || got != want {
		return x.mismatch(offset)
	}
	return nil
}

func (x *Index) mismatch(offset int64) error {
	return fmt.Errorf("%w %s: those before byte %d", ErrMismatch, x.Blob, offset)
}

// hashAt returns the blob's hash after the bytes before an offset on the grid.
func (x *Index) hashAt(offset int64) (hash.Hash, error) {
	if offset == 0 {
		return sha256.New(), nil
	}
	s, ok := x.state(offset)
	if !ok {
		return nil, fmt.Errorf("verify %s: no state at byte %d", x.Blob, offset)
	}
	return hashFrom(s, offset)
}

// state returns the state at an offset on the grid. ok is false at the start and at the blob's end.
func (x *Index) state(offset int64) (s State, ok bool) {
	i := offset/Grid - 1
	if i < 0 || i >= int64(len(x.States)) {
		return s, false
	}
	return x.States[i], true
}
