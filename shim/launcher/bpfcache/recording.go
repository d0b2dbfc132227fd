package bpfcache

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// Recording holds the calls to libseccomp that made a filter, and the filter.
type Recording struct {
	calls   []byte // of struct recorded_call
	program []byte // of struct sock_filter
}

// An encoded recording, in the machine's byte order: header, calls, program.
//
//	0   magic
//	8   length of the calls, length of the program (uint32)
//	16  xxhash of the rest
const headerSize = 24

// magic changes with the format.
var magic = [8]byte{'b', 'e', 'r', 't', 'h', 'f', 'i', '1'}

// maxRecording bounds a recording, in bytes. The kernel accepts at most 4,096 instructions, and a
// profile has fewer than 10,000 rules.
const maxRecording = 512 << 10

func (m *Recording) encode() []byte {
	b := make([]byte, 0, headerSize+len(m.calls)+len(m.program))
	b = append(b, magic[:]...)
	b = binary.NativeEndian.AppendUint32(b, uint32(len(m.calls)))
	b = binary.NativeEndian.AppendUint32(b, uint32(len(m.program)))
	b = binary.NativeEndian.AppendUint64(b, 0)
	b = append(append(b, m.calls...), m.program...)
	binary.NativeEndian.PutUint64(b[16:], xxhash.Sum64(b[headerSize:]))
	return b
}

// decode is the inverse of encode. The recording shares data's memory. It checks all lengths, so
// bpfcache.c need not check them again.
func decode(data []byte) (*Recording, error) {
	if len(data) < headerSize || len(data) > maxRecording || !bytes.Equal(data[:8], magic[:]) {
		return nil, errors.New("not a recording")
	}
	calls, program := uint64(binary.NativeEndian.Uint32(data[8:])), uint64(binary.NativeEndian.Uint32(data[12:]))
	body := data[headerSize:]
	if calls+program != uint64(len(body)) {
		return nil, fmt.Errorf("recording of %d bytes has a header for %d and %d bytes", len(data), calls, program)
	}
	if xxhash.Sum64(body) != binary.NativeEndian.Uint64(data[16:]) {
		return nil, errors.New("damaged recording")
	}
	m := &Recording{calls: body[:calls], program: body[calls:]}
	if err := m.check(); err != nil {
		return nil, err
	}
	return m, nil
}

const (
	instructionSize = 8
	maxInstructions = 4096
	callSize        = 24 // of struct recorded_call
	argSize         = 24 // of struct scmp_arg_cmp
	maxArgs         = 6
)

// The kinds of struct recorded_call.
const (
	kindInit = 1 + iota
	kindArch
	kindAttr
	kindRule
)

// check checks that calls and program have the format of bpfcache.h.
func (m *Recording) check() error {
	if n := len(m.program); n == 0 || n%instructionSize != 0 || n/instructionSize > maxInstructions {
		return fmt.Errorf("recording with a program of %d bytes", n)
	}
	if len(m.calls) == 0 {
		return errors.New("recording without calls")
	}
	for rest, last := m.calls, uint32(0); len(rest) > 0; {
		if len(rest) < callSize {
			return errors.New("recording ends within a call")
		}
		kind, args := binary.NativeEndian.Uint32(rest), binary.NativeEndian.Uint32(rest[16:])
		switch {
		case (last == 0) != (kind == kindInit), kind > kindRule, last == kindRule && kind != kindRule:
			return fmt.Errorf("recording has call %d after %d", kind, last)
		case args > maxArgs, args > 0 && kind != kindRule, len(rest) < callSize+int(args)*argSize:
			return fmt.Errorf("recording has %d arguments of call %d", args, kind)
		}
		rest, last = rest[callSize+args*argSize:], kind
	}
	return nil
}
