//go:build isal && cgo

package isal

/*
#cgo LDFLAGS: -ldl
#include <stdlib.h>
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
};

static void begin(struct reader *r)
{
	isal_library.inflate_init(&r->state);
	isal_library.gzip_header_init(&r->header);
	r->header.flags = 0;
	r->state.crc_flag = ISAL_GZIP_NO_HDR_VER; // the trailer is verified
	r->in_header = 1;
}

static int inflate_some(struct reader *r)
{
	if (r->in_header) {
		int code = isal_library.read_gzip_header(&r->state, &r->header);
		if (code != ISAL_DECOMP_OK)
			return code;
		r->in_header = 0;
	}
	return isal_library.inflate(&r->state);
}

// inflate retains neither buffer: the library copies what it needs.
static struct step inflate(struct reader *r, uint8_t *in, uint32_t in_len, uint8_t *out, uint32_t out_len)
{
	struct inflate_state *s = &r->state;
	s->next_in = in, s->avail_in = in_len;
	s->next_out = out, s->avail_out = out_len;
	int code = inflate_some(r);
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
)

// errMemory is the error of a library that gets no memory.
var errMemory = errors.New("no memory for ISA-L")

// Reader implements io.ReadCloser. Not safe for concurrent use.
type Reader struct {
	from  *bufio.Reader
	state *C.struct_reader // in C's memory; nil after Close
	err   error            // final
}

// Loaded reports whether the library was loaded.
func Loaded() bool { return C.isal_library.inflate != nil }

// Works reports whether the library was loaded and decompresses a sample.
func Works() bool { return works() }

var works = sync.OnceValue(func() bool { return Loaded() && C.isal_works() != 0 })

// NewReader returns a reader of the gzip in from. The caller calls it only if Works is true, and
// closes the reader, which does not close from.
func NewReader(from *bufio.Reader) (*Reader, error) {
	state := (*C.struct_reader)(C.calloc(1, C.sizeof_struct_reader))
	if state == nil {
		return nil, errMemory
	}
	C.begin(state)
	return &Reader{from: from, state: state}, nil
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

// step decompresses buffered input. It makes progress or fails.
func (r *Reader) step(p []byte) (int, error) {
	_, err := r.from.Peek(1)
	if err != nil && err != io.EOF {
		return 0, err
	}
	in, _ := r.from.Peek(r.from.Buffered()) // buffered input comes first
	s := C.inflate(r.state, bytesOf(in), C.uint32_t(len(in)), bytesOf(p), C.uint32_t(len(p)))
	made, read := len(p)-int(s.unused), len(in)-int(s.unread)
	if _, err := r.from.Discard(read); err != nil {
		return made, err
	}
	switch {
	case s.code < 0:
		return made, fmt.Errorf("gzip: %s", problem(s.code))
	case s.finished != 0:
		return made, r.next()
	case err == io.EOF && made == 0 && read == 0:
		return made, io.ErrUnexpectedEOF
	}
	return made, nil
}

// next begins with the next member, if there is one.
func (r *Reader) next() error {
	if _, err := r.from.Peek(1); err != nil {
		return err
	}
	C.begin(r.state)
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
