package filter

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// Memo is what libseccomp was told of a filter, and what it made of it.
type Memo struct {
	calls   []byte // of struct memo_call
	program []byte // of struct sock_filter
}

// A memo in bytes, in the machine's order: header, calls, program.
//
//	0   magic
//	8   length of the calls, length of the program (uint32)
//	16  xxhash of what follows
const headerSize = 24

// magic changes with the form.
var magic = [8]byte{'b', 'e', 'r', 't', 'h', 'f', 'i', '1'}

// maxMemo bounds a memo: 4,096 instructions are all that the kernel takes, 10,000 rules are more than there are system calls.
const maxMemo = 512 << 10

func (m *Memo) encode() []byte {
	b := make([]byte, 0, headerSize+len(m.calls)+len(m.program))
	b = append(b, magic[:]...)
	b = binary.NativeEndian.AppendUint32(b, uint32(len(m.calls)))
	b = binary.NativeEndian.AppendUint32(b, uint32(len(m.program)))
	b = binary.NativeEndian.AppendUint64(b, 0)
	b = append(append(b, m.calls...), m.program...)
	binary.NativeEndian.PutUint64(b[16:], xxhash.Sum64(b[headerSize:]))
	return b
}

// decode is encode's inverse. The memo shares data's memory. What it accepts memo.c can read without looking at lengths again.
func decode(data []byte) (*Memo, error) {
	if len(data) < headerSize || len(data) > maxMemo || !bytes.Equal(data[:8], magic[:]) {
		return nil, errors.New("not a memo")
	}
	calls, program := uint64(binary.NativeEndian.Uint32(data[8:])), uint64(binary.NativeEndian.Uint32(data[12:]))
	body := data[headerSize:]
	if calls+program != uint64(len(body)) {
		return nil, fmt.Errorf("a memo of %d bytes says that it has %d and %d", len(data), calls, program)
	}
	if xxhash.Sum64(body) != binary.NativeEndian.Uint64(data[16:]) {
		return nil, errors.New("a damaged memo")
	}
	m := &Memo{calls: body[:calls], program: body[calls:]}
	if err := m.check(); err != nil {
		return nil, err
	}
	return m, nil
}

const (
	instructionSize = 8
	maxInstructions = 4096
	callSize        = 24 // of struct memo_call
	argSize         = 24 // of struct scmp_arg_cmp
	maxArgs         = 6
)

// The kinds of struct memo_call.
const (
	kindInit = 1 + iota
	kindArch
	kindAttr
	kindRule
)

// check tells whether the calls and the program have the form that memo.h promises.
func (m *Memo) check() error {
	if n := len(m.program); n == 0 || n%instructionSize != 0 || n/instructionSize > maxInstructions {
		return fmt.Errorf("a memo with a program of %d bytes", n)
	}
	if len(m.calls) == 0 {
		return errors.New("a memo without calls")
	}
	for rest, last := m.calls, uint32(0); len(rest) > 0; {
		if len(rest) < callSize {
			return errors.New("a memo that ends within a call")
		}
		kind, args := binary.NativeEndian.Uint32(rest), binary.NativeEndian.Uint32(rest[16:])
		switch {
		case (last == 0) != (kind == kindInit), kind > kindRule, last == kindRule && kind != kindRule:
			return fmt.Errorf("a memo with call %d after %d", kind, last)
		case args > maxArgs, args > 0 && kind != kindRule, len(rest) < callSize+int(args)*argSize:
			return fmt.Errorf("a memo with %d arguments of call %d", args, kind)
		}
		rest, last = rest[callSize+args*argSize:], kind
	}
	return nil
}
