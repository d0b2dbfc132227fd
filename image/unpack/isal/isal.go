//go:build isal && cgo

package isal

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
#include <string.h>
#include "load.h"

struct step {
	int code;
	uint32_t unread; // of the input
	uint32_t unused; // of the output
	int finished;    // the member, its trailer included
};

struct reader {
	struct inflate_state state;
	struct isal_gzip_header header; // isal_inflate loses its own header state when the input ends within a header
	int in_header;
	int to_end; // the current block has a false final bit, see find_block
};

// pending returns the number of decompressed bytes that the library has not copied to its caller.
static uint32_t pending(const struct inflate_state *s)
{
	return s->tmp_out_valid - s->tmp_out_processed;
}

// begin prepares for the header of a member.
static void begin(struct reader *r)
{
	isal_library.inflate_init(&r->state);
	isal_library.gzip_header_init(&r->header);
	r->header.flags = 0;
	r->state.crc_flag = ISAL_GZIP_NO_HDR_VER; // the trailer is verified
	r->in_header = 1, r->to_end = 0;
}

// begin_inside prepares for a block inside a member, after the bytes of window. The first bits are
// the most significant ones of byte. The checksum of that member will be wrong.
static int begin_inside(struct reader *r, uint8_t *window, uint32_t window_len, uint32_t bits, uint8_t byte)
{
	begin(r);
	r->in_header = 0;
	r->state.read_in = bits ? byte >> (8 - bits) : 0;
	r->state.read_in_length = bits;
	return isal_library.inflate_set_dict(&r->state, window, window_len);
}

// block is the start of a deflate block.
struct block {
	int wanted, found;
	uint32_t bits; // of the input that was consumed before it, and belong to it
	uint8_t byte; // the most significant of these bits, less than 8
	uint32_t ahead; // decompressed bytes before it that were not copied yet
	const uint8_t *window; // the bytes before it: all since the start of the member, or 32 KiB
	uint32_t window_len;
};

// make_room moves the content of the library's own buffer to its start, except bytes that are
// neither pending nor history. The library does this at the end of each call that is not the last
// of a member. It fills the buffer before it uses the caller's, and then takes its bytes for the
// history.
static void make_room(struct inflate_state *s)
{
	if (s->tmp_out_processed < ISAL_DEF_HIST_SIZE)
		return;
	int32_t shift = s->tmp_out_valid - ISAL_DEF_HIST_SIZE;
	if (shift > s->tmp_out_processed)
		shift = s->tmp_out_processed;
	memmove(s->tmp_out_buffer, s->tmp_out_buffer + shift, s->tmp_out_valid - shift);
	s->tmp_out_valid -= shift, s->tmp_out_processed -= shift;
}

// find_block decompresses until a block begins. The library stops only behind the last block of a
// member. So this marks the current block as the last one. Where the library stops, this changes
// its state to the state between two blocks. The library loses bits when it ends a member, and does
// that only when it has copied all bytes. So one byte is always left for later.
static int find_block(struct reader *r, struct block *block)
{
	struct inflate_state *s = &r->state;
	uint8_t *next_out = s->next_out;
	uint32_t avail_out = s->avail_out;
	int inside = s->block_state == ISAL_BLOCK_CODED || s->block_state == ISAL_BLOCK_TYPE0;
	if (!r->to_end && (!inside || s->bfinal || pending(s) == 0)) {
		s->avail_out = 0; // decompress to the library's own buffer only, so that bytes are left
		int code = isal_library.inflate(s);
		s->next_out = next_out, s->avail_out = avail_out;
		if (code < 0)
			return code;
		inside = s->block_state == ISAL_BLOCK_CODED || s->block_state == ISAL_BLOCK_TYPE0;
		if (!inside || s->bfinal || pending(s) == 0)
			return isal_library.inflate(s); // not now
	}
	s->bfinal = 1, r->to_end = 1;
	uint32_t most = pending(s) - 1, kept = avail_out > most ? avail_out - most : 0;
	s->avail_out -= kept;
	int code = isal_library.inflate(s);
	s->avail_out += kept;
	if (code < 0 || s->block_state != ISAL_BLOCK_INPUT_DONE)
		return code;
	s->block_state = ISAL_BLOCK_NEW_HDR, s->bfinal = 0, r->to_end = 0;
	make_room(s);
	uint32_t part = s->read_in_length % 8;
	block->found = 1;
	block->bits = s->read_in_length;
	block->byte = (s->read_in & ((1u << part) - 1)) << (8 - part);
	block->ahead = pending(s);
	block->window_len = s->tmp_out_valid < ISAL_DEF_HIST_SIZE ? s->tmp_out_valid : ISAL_DEF_HIST_SIZE;
	block->window = s->tmp_out_buffer + s->tmp_out_valid - block->window_len;
	return code;
}

static int inflate_some(struct reader *r, struct block *block)
{
	if (r->in_header) {
		int code = isal_library.read_gzip_header(&r->state, &r->header);
		if (code != ISAL_DECOMP_OK)
			return code;
		r->in_header = 0;
	}
	if (block->wanted || r->to_end)
		return find_block(r, block);
	return isal_library.inflate(&r->state);
}

// inflate retains neither buffer: the library copies what it needs. It looks for the start of a
// block if one is wanted.
static struct step inflate(struct reader *r, uint8_t *in, uint32_t in_len, uint8_t *out, uint32_t out_len,
	struct block *block)
{
	struct inflate_state *s = &r->state;
	s->next_in = in, s->avail_in = in_len;
	s->next_out = out, s->avail_out = out_len;
	int code = inflate_some(r, block);
	struct step step = {code, s->avail_in, s->avail_out, !r->in_header && s->block_state == ISAL_BLOCK_FINISH};
	s->next_in = s->next_out = NULL;
	return step;
}
*/
import "C"

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"unsafe"

	"berth/image/blobindex"
	"berth/image/unpack/inflate/padding"
)

// errMemory is the error if the library gets no memory.
var errMemory = errors.New("no memory for ISA-L")

// Reader implements io.ReadCloser. Not safe for concurrent use.
type Reader struct {
	from   *bufio.Reader
	state  *C.struct_reader    // in C's memory; nil after Close
	points *blobindex.Recorder // may be nil
	inside bool                // reading has begun inside the member
	in     int64               // bytes read
	out    int64               // bytes returned
	err    error               // final
}

// Loaded reports whether the library was loaded.
func Loaded() bool { return C.isal_library.inflate != nil }

// Works reports whether the library was loaded and decompresses a sample.
func Works() bool { return works() }

var works = sync.OnceValue(func() bool { return Loaded() && C.isal_works() != 0 })

// NewReader returns a reader of the gzip in from. It records where decompression can begin; points
// may be nil. The caller calls it only if Works is true, and closes the reader, which does not
// close from.
func NewReader(from *bufio.Reader, points *blobindex.Recorder) (*Reader, error) {
	state := (*C.struct_reader)(C.calloc(1, C.sizeof_struct_reader))
	if state == nil {
		return nil, errMemory
	}
	C.begin(state)
	points.Begin(blobindex.Gzip)
	return &Reader{from: from, state: state, points: points}, nil
}

// NewReaderAt is NewReader for a point of the gzip, where from begins. window is the decompressed
// window of the point. The checksum of the member around the point is not verified.
func NewReaderAt(from *bufio.Reader, p *blobindex.Point, window []byte) (*Reader, error) {
	r, err := NewReader(from, nil)
	if err != nil || p.Start {
		return r, err
	}
	r.inside = true
	if code := C.begin_inside(r.state, bytesOf(window), C.uint32_t(len(window)), C.uint32_t(p.Bits), C.uint8_t(p.Byte)); code < 0 {
		return nil, errors.Join(fmt.Errorf("begin at a point: %s", problem(code)), r.Close())
	}
	return r, nil
}

// Close frees the reader's memory.
func (r *Reader) Close() error {
	C.free(unsafe.Pointer(r.state))
	r.state, r.err = nil, errors.New("read after Close")
	return nil
}

// Read implements io.Reader. Errors of the source are returned unchanged.
func (r *Reader) Read(p []byte) (int, error) {
	p = p[:min(len(p), math.MaxInt32)]
	for r.err == nil && len(p) > 0 {
		n, err := r.step(p)
		r.err = err
		if n > 0 {
			return n, nil
		}
	}
	return 0, r.err
}

// step decompresses buffered input. Each call makes progress or fails.
func (r *Reader) step(p []byte) (int, error) {
	_, err := r.from.Peek(1)
	if err != nil && err != io.EOF {
		return 0, err
	}
	in, _ := r.from.Peek(r.from.Buffered()) // buffered input comes first
	var block C.struct_block
	if r.points.Wants(r.out) {
		block.wanted = 1
	}
	s := C.inflate(r.state, bytesOf(in), C.uint32_t(len(in)), bytesOf(p), C.uint32_t(len(p)), &block)
	made, read := len(p)-int(s.unused), len(in)-int(s.unread)
	r.in += int64(read)
	r.out += int64(made)
	if block.found != 0 {
		r.found(&block)
	}
	if _, err := r.from.Discard(read); err != nil {
		return made, err
	}
	switch {
	case s.code == C.ISAL_INCORRECT_CHECKSUM && r.inside:
		return made, r.next()
	case s.code < 0:
		return made, fmt.Errorf("gzip: %s", problem(s.code))
	case s.finished != 0:
		return made, r.next()
	case err == io.EOF && made == 0 && read == 0:
		return made, io.ErrUnexpectedEOF
	}
	return made, nil
}

// found records the start of a block.
func (r *Reader) found(b *C.struct_block) {
	r.points.Block(blobindex.Point{
		In: r.in - int64(b.bits/8), Out: r.out + int64(b.ahead), Bits: uint8(b.bits % 8), Byte: byte(b.byte),
		Window: unsafe.Slice((*byte)(b.window), b.window_len),
	})
}

// next begins with the next member, if there is one.
func (r *Reader) next() error {
	if err := padding.Skip(r.from); err != nil {
		return err
	}
	r.points.Start(r.in, r.out)
	C.begin(r.state)
	r.inside = false
	return nil
}

func bytesOf(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.SliceData(b)) }

// problem describes a negative return code.
func problem(code C.int) string {
	switch code {
	case C.ISAL_INVALID_BLOCK:
		return "invalid block"
	case C.ISAL_INVALID_SYMBOL:
		return "invalid symbol"
	case C.ISAL_INVALID_LOOKBACK:
		return "a repetition of what is before the beginning"
	case C.ISAL_INVALID_WRAPPER:
		return "invalid header"
	case C.ISAL_UNSUPPORTED_METHOD:
		return "unknown method of compression"
	case C.ISAL_INCORRECT_CHECKSUM:
		return "invalid checksum"
	}
	return fmt.Sprintf("error %d", int(code))
}
