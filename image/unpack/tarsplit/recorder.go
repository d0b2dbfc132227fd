package tarsplit

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/klauspost/compress/flate"
)

// Recorder is a reader of a tar that records what is read. It is not safe for concurrent use.
type Recorder struct {
	from    io.Reader
	out     io.Writer // nil: nothing is recorded
	content int64     // bytes of the current file's content that are still to come

	literal    []byte // not yet in block
	block      []byte // operations
	blockBytes int64  // bytes of the tar that block covers
	compressed bytes.Buffer
	deflate    *flate.Writer

	written     int64 // bytes of the record
	literals    int64 // bytes
	unsupported bool
	err         error // of out
}

// NewRecorder returns a Recorder of a tar to out. If out is nil, nothing is recorded.
func NewRecorder(from io.Reader, out io.Writer) *Recorder {
	r := &Recorder{from: from, out: out}
	if out == nil {
		return r
	}
	r.deflate, r.err = flate.NewWriter(&r.compressed, flate.BestSpeed)
	r.put([]byte(magic))
	return r
}

// Read implements io.Reader.
func (r *Recorder) Read(p []byte) (int, error) {
	n, err := r.from.Read(p)
	if r.recording() {
		r.note(p[:n])
	}
	return n, err
}

// Content records where the next size bytes of the tar are stored. They are the content of a file.
func (r *Recorder) Content(size int64, at Ref) {
	if !r.recording() || size == 0 {
		return
	}
	r.endLiteral()
	r.operation(size, kindContent)
	if at.Name == "" {
		r.block = binary.AppendUvarint(r.block, uint64(at.Offset)+1)
	} else {
		r.block = binary.AppendUvarint(append(r.block, 0), uint64(len(at.Name)))
		r.block = append(r.block, at.Name...)
	}
	r.content = size
	r.endBlock()
}

// Drop ends the recording, because recorded content is no longer in the layer.
func (r *Recorder) Drop() { r.unsupported = true }

func (r *Recorder) recording() bool { return r.out != nil && !r.unsupported && r.err == nil }

// note records bytes of the tar.
func (r *Recorder) note(p []byte) {
	known := min(int64(len(p)), r.content)
	r.content -= known
	for p = p[known:]; len(p) > 0; {
		n := min(len(p), literalSize-len(r.literal))
		r.literal = append(r.literal, p[:n]...)
		p = p[n:]
		if len(r.literal) == literalSize {
			r.endLiteral()
			r.endBlock()
		}
	}
}

// endLiteral moves the collected bytes to the block.
func (r *Recorder) endLiteral() {
	for rest := r.literal; len(rest) > 0; {
		some, zeros := split(rest)
		if some > 0 {
			r.operation(int64(some), kindLiteral)
			r.block = append(r.block, rest[:some]...)
		}
		if zeros > 0 {
			r.operation(int64(zeros), kindZeros)
		}
		rest = rest[some+zeros:]
	}
	if r.literals += int64(len(r.literal)); r.literals > maxLiteral {
		r.unsupported = true
	}
	r.literal = r.literal[:0]
}

// operation begins an operation for bytes of the tar.
func (r *Recorder) operation(size int64, kind uint64) {
	r.block = binary.AppendUvarint(r.block, uint64(size)<<kindBits|kind)
	r.blockBytes += size
}

// minZeros is the shortest run of zeros with an operation of its own.
const minZeros = 16

var zeros [minZeros]byte

// split returns the number of bytes before the first long run of zeros, and the length of the run.
func split(p []byte) (some, run int) {
	some = bytes.Index(p, zeros[:])
	if some < 0 {
		return len(p), 0
	}
	end := some + minZeros
	for end < len(p) && p[end] == 0 {
		end++
	}
	return some, end - some
}

// endBlock writes the block if it is large enough.
func (r *Recorder) endBlock() {
	if len(r.block) >= blockSize {
		r.writeBlock()
	}
}

func (r *Recorder) writeBlock() {
	r.compressed.Reset()
	r.deflate.Reset(&r.compressed)
	_, _ = r.deflate.Write(r.block) // a bytes.Buffer does not fail
	_ = r.deflate.Close()
	var header []byte
	for _, n := range []int64{int64(len(r.block)), int64(r.compressed.Len()), r.blockBytes} {
		header = binary.AppendUvarint(header, uint64(n))
	}
	r.put(header)
	r.put(r.compressed.Bytes())
	r.block, r.blockBytes = r.block[:0], 0
}

func (r *Recorder) put(p []byte) {
	if r.written += int64(len(p)); r.written > MaxFile {
		r.unsupported = true
	}
	if !r.recording() {
		return
	}
	if _, err := r.out.Write(p); err != nil {
		r.err = fmt.Errorf("record the tar: %w", err)
	}
}

// Finish ends the record after the end of the tar. If the tar cannot be restored, kept is false,
// and the record is of no use.
func (r *Recorder) Finish() (kept bool, err error) {
	if r.recording() {
		r.endLiteral()
		if len(r.block) > 0 {
			r.writeBlock()
		}
	}
	return r.recording(), r.err
}
