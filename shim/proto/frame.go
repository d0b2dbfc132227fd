package proto

import (
	"encoding/binary"
	"errors"
)

// FrameType is the type of a frame on the monitor's socket.
type FrameType byte

// Requests of a client. The monitor answers each of FrameAttach, FrameResize, FrameReopen and
// FrameCloseStdin with FrameOK or FrameError, in order. It does not answer the others.
const (
	FrameAttach     FrameType = 1 + iota // payload: one byte, Streams
	FrameStdin                           // payload: bytes for the container's stdin
	FrameStdinEOF                        // the client's input has ended
	FrameResize                          // payload: TerminalSize
	FrameReopen                          // open the log file again
	FrameCloseStdin                      // close the container's stdin, even with clients attached
)

// Messages of a monitor. After FrameAttach it sends FrameStdout and FrameStderr as the container
// writes. It closes the connection after the container's end.
const (
	FrameOK     FrameType = 16 + iota // the request succeeded
	FrameError                        // payload: the reason
	FrameStdout                       // payload: output
	FrameStderr                       // payload: output
)

// Streams is the set of streams that an attaching client asks for.
type Streams byte

const (
	WantStdin Streams = 1 << iota
	WantStdout
	WantStderr
)

const (
	// MaxPayload is the maximum length of a frame's payload, in bytes.
	MaxPayload = 32 << 10
	// HeaderSize is the length of a frame's header: the type, and the payload's length in four
	// big-endian bytes.
	HeaderSize = 5
)

// Frame is one message on the monitor's socket. Payload shares the buffer it was decoded from.
type Frame struct {
	Type    FrameType
	Payload []byte
}

// AppendHeader appends the header of a frame whose payload of size bytes, at most MaxPayload,
// follows.
func AppendHeader(dst []byte, t FrameType, size int) []byte {
	return binary.BigEndian.AppendUint32(append(dst, byte(t)), uint32(size))
}

// AppendFrame appends a whole frame.
func AppendFrame(dst []byte, t FrameType, payload []byte) []byte {
	return append(AppendHeader(dst, t, len(payload)), payload...)
}

// NextFrame decodes the first frame of buf and returns its length in bytes, 0 if it is incomplete.
// After an error the rest of the stream is unusable.
func NextFrame(buf []byte) (f Frame, size int, err error) {
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
	return Frame{Type: FrameType(buf[0]), Payload: buf[HeaderSize:size]}, size, nil
}

// TerminalSize is a terminal's size, in characters.
type TerminalSize struct{ Width, Height uint16 }

// Encode returns the payload of a FrameResize.
func (s TerminalSize) Encode() []byte {
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, s.Width), s.Height)
}

// DecodeTerminalSize decodes the payload of a FrameResize.
func DecodeTerminalSize(payload []byte) (TerminalSize, error) {
	if len(payload) != 4 {
		return TerminalSize{}, errors.New("bad terminal size")
	}
	return TerminalSize{binary.BigEndian.Uint16(payload), binary.BigEndian.Uint16(payload[2:])}, nil
}
