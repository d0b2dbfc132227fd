package test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"

	"berth/shim/proto"
)

// FuzzClient sends arbitrary bytes to a monitor. It answers each request, in order, the container
// gets its input once, and the monitor closes the connection in the end.
func FuzzClient(f *testing.F) {
	hello := proto.AppendFrame(proto.AppendFrame(proto.AppendFrame(nil, proto.FrameAttach, []byte{byte(proto.WantStdin)}), proto.FrameStdin, []byte("hello")), proto.FrameStdinEOF, nil)
	f.Add(hello, 100, false)
	f.Add(proto.AppendFrame(proto.AppendFrame(hello, proto.FrameStdin, []byte("late")), proto.FrameCloseStdin, nil), 3, true)
	f.Add(proto.AppendFrame(proto.AppendFrame(nil, proto.FrameAttach, []byte{7}), proto.FrameStdin, bytes.Repeat([]byte("x"), 10_000)), 4000, false)
	f.Add(proto.AppendFrame(proto.AppendFrame(proto.AppendFrame(nil, proto.FrameAttach, nil), proto.FrameResize, proto.TerminalSize{Width: 1}.Encode()), proto.FrameReopen, nil), 9, false)
	f.Add([]byte{2, 0xff, 0xff, 0xff, 0xff, 0}, 1, false)
	f.Fuzz(func(t *testing.T, data []byte, piece int, once bool) {
		piece = 1 + int(uint(piece)%40_000)
		flag := uint32(0)
		if once {
			flag = 1
		}
		got := ask(t, 'c', flag, uint32(piece), data)
		if binary.BigEndian.Uint32(got) == 0 {
			t.Error("the client is still there")
		}
		said := binary.BigEndian.Uint32(got[4:])
		gotAnswers, gotInput := got[8:8+said], got[8+said:]
		answers, input := wanted(data, once)
		if kinds := kindsOf(t, gotAnswers); !bytes.Equal(kinds, answers) {
			t.Errorf("answers %v, want %v", kinds, answers)
		}
		if !bytes.Equal(gotInput, input) {
			t.Errorf("the container got %d bytes %.50q, want %d", len(gotInput), gotInput, len(input))
		}
	})
}

// wanted returns the expected results of a client's requests: the types of the answers, and the
// container's input.
func wanted(data []byte, once bool) (answers, input []byte) {
	var attached, feeds, closed bool
	for {
		frame, size, err := proto.NextFrame(data)
		if size == 0 || err != nil {
			return answers, input
		}
		data = data[size:]
		answer := proto.FrameOK
		switch frame.Type {
		case proto.FrameStdin:
			if feeds && !closed {
				input = append(input, frame.Payload...)
			}
			continue
		case proto.FrameStdinEOF:
			closed = closed || feeds && once
			feeds = false
			continue
		case proto.FrameAttach:
			if attached || len(frame.Payload) != 1 {
				answer = proto.FrameError
				break
			}
			attached, feeds = true, proto.Streams(frame.Payload[0])&proto.WantStdin != 0
		case proto.FrameCloseStdin:
			closed = true
		case proto.FrameReopen: // there is no log
		default: // a size, without a terminal, or nothing known
			answer = proto.FrameError
		}
		answers = append(answers, byte(answer))
	}
}

func kindsOf(t *testing.T, data []byte) (kinds []byte) {
	t.Helper()
	for len(data) > 0 {
		frame, size, err := proto.NextFrame(data)
		if size == 0 || err != nil {
			t.Fatalf("%v in %q", errors.Join(err, io.ErrUnexpectedEOF), data)
		}
		kinds = append(kinds, byte(frame.Type))
		data = data[size:]
	}
	return kinds
}

// An event of a connection that was closed to make room is not taken for one of the next
// connection, which has the same descriptor.
func TestEventOfClosedConnection(t *testing.T) {
	got := ask(t, 'e')
	if binary.BigEndian.Uint32(got) == 0 {
		t.Fatal("the new connection has another descriptor: nothing was tested")
	}
	if binary.BigEndian.Uint32(got[4:]) != 0 {
		t.Error("the new connection counts as hung up")
	}
}
