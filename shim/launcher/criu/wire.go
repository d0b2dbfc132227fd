package criu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// This file reads and writes the encoding of protobuf messages. Package protowire does the same.
// But its initialization opens and hashes the running program, in each launcher and each init.

// kind is the wire type of a field.
type kind byte

// The wire types that CRIU's decoder knows. It refuses groups.
const (
	varintKind  kind = 0
	fixed64Kind kind = 1
	bytesKind   kind = 2
	fixed32Kind kind = 5
)

const maxNumber = math.MaxInt32 // of a field, as for package protowire

var errWire = errors.New("not an encoded message")

// field is a field of an encoded message.
type field struct {
	number  int
	kind    kind
	encoded []byte // the whole field
	content []byte // the encoded value; for bytesKind the bytes
}

// integer returns the value of a field of varintKind.
func (f field) integer() uint64 {
	v, _ := binary.Uvarint(f.content) // nextField has checked it
	return v
}

// bytes returns the value of a field of bytesKind, otherwise nil.
func (f field) bytes() []byte {
	if f.kind != bytesKind {
		return nil
	}
	return f.content
}

// eachField calls do with each field of a message.
func eachField(data []byte, do func(field) error) error {
	for len(data) > 0 {
		f, err := nextField(data)
		if err != nil {
			return err
		}
		if err := do(f); err != nil {
			return err
		}
		data = data[len(f.encoded):]
	}
	return nil
}

// nextField returns the first field of a message.
func nextField(data []byte) (f field, err error) {
	tag, begin := binary.Uvarint(data)
	if begin <= 0 || tag>>3 == 0 || tag>>3 > maxNumber {
		return f, errWire
	}
	f.number, f.kind = int(tag>>3), kind(tag&7)
	var size int
	switch value := data[begin:]; f.kind {
	case varintKind:
		_, size = binary.Uvarint(value)
	case fixed64Kind:
		size = 8
	case fixed32Kind:
		size = 4
	case bytesKind:
		length, n := binary.Uvarint(value)
		if n <= 0 || length > uint64(len(value)-n) {
			return f, errWire
		}
		begin += n
		size = int(length)
	default:
		return f, fmt.Errorf("%w: wire type %d", errWire, f.kind)
	}
	if size < 0 || size > len(data)-begin || size == 0 && f.kind == varintKind {
		return f, errWire
	}
	f.encoded, f.content = data[:begin+size], data[begin:begin+size]
	return f, nil
}

// appendInteger adds a field of varintKind to a message.
func appendInteger(message []byte, number int, value uint64) []byte {
	return binary.AppendUvarint(appendTag(message, number, varintKind), value)
}

// appendBytes adds a field of bytesKind to a message.
func appendBytes(message []byte, number int, value []byte) []byte {
	message = binary.AppendUvarint(appendTag(message, number, bytesKind), uint64(len(value)))
	return append(message, value...)
}

func appendTag(message []byte, number int, k kind) []byte {
	return binary.AppendUvarint(message, uint64(number)<<3|uint64(k))
}
