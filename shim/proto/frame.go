package proto

import (
	"encoding/binary"
	"time"

	"berth/internal/frame"
)

// FrameType is the type of a frame on the monitor's socket.
type FrameType byte

// Requests of a client. The monitor answers each of FrameAttach, FrameResize, FrameReopen,
// FrameCloseStdin, FrameFreeze and FrameThaw with FrameOK or FrameError, in order. It does not
// answer other frames.
//
// FrameFreeze is answered when all processes of the cgroup are frozen. The monitor thaws the cgroup
// after FrameThaw, at the end of the connection, and when the request's timeout is over. Monitors
// of berth 0.2 answer it with FrameError.
const (
	FrameAttach     FrameType = 1 + iota // payload: one byte, Streams
	FrameStdin                           // payload: bytes for the container's stdin
	FrameStdinEOF                        // the client's input has ended
	FrameResize                          // payload: TerminalSize
	FrameReopen                          // open the log file again
	FrameCloseStdin                      // close the container's stdin, even with clients attached
	FrameFreeze                          // payload: FreezeRequest
	FrameThaw                            // thaw what this client has frozen
)

// Messages of a monitor. After FrameAttach it sends FrameStdout and FrameStderr as the container
// writes. It closes the connection after the container's end, or when it gives up the client.
//
// A monitor whose answer to FrameAttach has the payload AnnouncesEnd sends FrameEnd before. If it
// does not come, output is missing. Monitors of berth 0.2 do not send it, and clients of that
// version ignore it.
const (
	FrameOK     FrameType = 16 + iota // the request succeeded
	FrameError                        // payload: the reason
	FrameStdout                       // payload: output
	FrameStderr                       // payload: output
	FrameEnd                          // payload: why output is missing; empty: the container has ended
)

// AnnouncesEnd is the payload of the answer to FrameAttach. See FrameEnd.
const AnnouncesEnd = 1

// Streams is the set of streams that an attaching client requests.
type Streams byte

const (
	WantStdin Streams = 1 << iota
	WantStdout
	WantStderr
)

const (
	// MaxPayload is the maximum length of a frame's payload, in bytes.
	MaxPayload = 32 << 10
	// HeaderSize is the length of a frame's header.
	HeaderSize = frame.HeaderSize
)

// Frame is one message on the monitor's socket, in the format of package frame. Payload shares the
// buffer it was decoded from.
type Frame struct {
	Type    FrameType
	Payload []byte
}

// AppendHeader appends a frame's header. The caller appends the payload of size bytes, at most
// MaxPayload.
func AppendHeader(dst []byte, t FrameType, size int) []byte {
	return frame.AppendHeader(dst, byte(t), size)
}

// AppendFrame appends a whole frame.
func AppendFrame(dst []byte, t FrameType, payload []byte) []byte {
	return append(AppendHeader(dst, t, len(payload)), payload...)
}

// NextFrame decodes the first frame of buf and returns its length in bytes, 0 if it is incomplete.
func NextFrame(buf []byte) (f Frame, size int, err error) {
	kind, payload, size, err := frame.Next(buf, MaxPayload)
	return Frame{Type: FrameType(kind), Payload: payload}, size, err
}

// TerminalSize is a terminal's size, in characters.
type TerminalSize struct{ Width, Height uint16 }

// Encode returns the payload of a FrameResize.
func (s TerminalSize) Encode() []byte {
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, s.Width), s.Height)
}

// FreezeRequest names the cgroup of a container that the monitor freezes.
type FreezeRequest struct {
	Timeout time.Duration // the monitor thaws the cgroup after it; at most 15 minutes, in whole milliseconds
	Dir     string        // the cgroup's directory: v2's, or of v1's freezer
}

// Encode returns the payload of a FrameFreeze.
func (r FreezeRequest) Encode() []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(max(r.Timeout.Milliseconds(), 1))), r.Dir...)
}
