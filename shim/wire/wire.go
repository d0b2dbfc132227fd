// Package wire is the protocol of a monitor's socket (Dir/sock): frames of one
// type byte, a four byte big-endian length, and that many bytes of payload. The
// monitor's side of it is shim/monitor/client.c.
//
// A client sends requests; each of Attach, Resize, Reopen and CloseStdin is
// answered by OK or Error, in order. After Attach the monitor sends Stdout and
// Stderr frames as the container writes, and closes the connection after the
// container's end. Stdin and StdinEOF are not answered.
package wire

import (
	"encoding/binary"
	"errors"
)

// Type says what a frame is.
type Type byte

// What a client sends.
const (
	Attach     Type = 1 + iota // payload: one byte, Streams
	Stdin                      // payload: bytes for the container's stdin
	StdinEOF                   // this client's input has ended
	Resize                     // payload: Size
	Reopen                     // open the log file anew
	CloseStdin                 // close the container's stdin, whoever is attached
)

// What a monitor sends.
const (
	OK     Type = 16 + iota // the request was carried out
	Error                   // payload: why not
	Stdout                  // payload: output
	Stderr                  // payload: output
)

// Streams is what an attached client wants to have.
type Streams byte

const (
	WantStdin Streams = 1 << iota
	WantStdout
	WantStderr
)

const (
	// MaxPayload is the longest payload of a frame, in bytes.
	MaxPayload = 32 << 10
	// HeaderSize is what comes before the payload, in bytes.
	HeaderSize = 5
)

// Frame is one message. The payload is part of the buffer it was decoded from.
type Frame struct {
	Type    Type
	Payload []byte
}

// Header appends the header of a frame with size bytes of payload, at most
// MaxPayload. The payload has to follow.
func Header(dst []byte, t Type, size int) []byte {
	return binary.BigEndian.AppendUint32(append(dst, byte(t)), uint32(size))
}

// Append appends a whole frame.
func Append(dst []byte, t Type, payload []byte) []byte {
	return append(Header(dst, t, len(payload)), payload...)
}

// Next decodes the first frame of buf and returns how many bytes it takes; 0 if
// it is not complete yet. An error means that the rest is not to be understood.
func Next(buf []byte) (f Frame, size int, err error) {
	if len(buf) < HeaderSize {
		return Frame{}, 0, nil
	}
	length := binary.BigEndian.Uint32(buf[1:HeaderSize])
	if length > MaxPayload {
		return Frame{}, 0, errors.New("frame is too long")
	}
	size = HeaderSize + int(length)
	if len(buf) < size {
		return Frame{}, 0, nil
	}
	return Frame{Type: Type(buf[0]), Payload: buf[HeaderSize:size]}, size, nil
}

// Size is a terminal's size, in characters.
type Size struct{ Width, Height uint16 }

// Encode returns the payload of a Resize frame.
func (s Size) Encode() []byte {
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, s.Width), s.Height)
}

// DecodeSize is the opposite of Encode.
func DecodeSize(payload []byte) (Size, error) {
	if len(payload) != 4 {
		return Size{}, errors.New("bad terminal size")
	}
	return Size{binary.BigEndian.Uint16(payload), binary.BigEndian.Uint16(payload[2:])}, nil
}
