package proto

import (
	"bytes"
	"testing"
)

func TestNextFrame(t *testing.T) {
	stream := AppendFrame(AppendFrame(nil, FrameStdin, []byte("hello")), FrameReopen, nil)
	for cut := range HeaderSize + 5 {
		if _, size, err := NextFrame(stream[:cut]); size != 0 || err != nil {
			t.Errorf("Next of %d bytes = %d, %v, want more to be asked for", cut, size, err)
		}
	}
	f, size, err := NextFrame(stream)
	if f.Type != FrameStdin || string(f.Payload) != "hello" || size != HeaderSize+5 || err != nil {
		t.Errorf("Next = %+v, %d, %v", f, size, err)
	}
	f, size, err = NextFrame(stream[size:])
	if f.Type != FrameReopen || len(f.Payload) != 0 || size != HeaderSize || err != nil {
		t.Errorf("Next = %+v, %d, %v", f, size, err)
	}
	if _, _, err := NextFrame(AppendHeader(nil, FrameStdin, MaxPayload+1)); err == nil {
		t.Error("a frame beyond the maximum was accepted")
	}
}

func TestTerminalSize(t *testing.T) {
	if got, want := (TerminalSize{Width: 300, Height: 50}).Encode(), []byte{1, 44, 0, 50}; !bytes.Equal(got, want) {
		t.Errorf("Encode = %v, want %v", got, want)
	}
}

// FuzzNextFrame checks that decoded frames encode to the same bytes, however they are split.
func FuzzNextFrame(f *testing.F) {
	f.Add(AppendFrame(nil, FrameAttach, []byte{byte(WantStdin | WantStdout)}), 1)
	f.Add(AppendFrame(AppendFrame(nil, FrameResize, TerminalSize{80, 25}.Encode()), FrameCloseStdin, nil), 7)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0}, 2)
	f.Fuzz(func(t *testing.T, data []byte, piece int) {
		whole, wholeErr := frames(t, data, len(data))
		pieces, err := frames(t, data, 1+int(uint(piece)%16))
		if !bytes.Equal(whole, pieces) || (err == nil) != (wholeErr == nil) {
			t.Fatalf("at once %q, %v; in pieces %q, %v", whole, wholeErr, pieces, err)
		}
		if !bytes.HasPrefix(data, whole) {
			t.Fatalf("%q became %q", data, whole)
		}
	})
}

// frames decodes data that arrives in pieces and returns the frames encoded again.
func frames(t *testing.T, data []byte, piece int) (out []byte, err error) {
	t.Helper()
	var in []byte
	for len(data) > 0 {
		n := min(piece, len(data))
		in, data = append(in, data[:n]...), data[n:]
		for {
			frame, size, err := NextFrame(in)
			if err != nil {
				return out, err
			}
			if size == 0 {
				break
			}
			if len(frame.Payload) > MaxPayload {
				t.Fatalf("a payload of %d bytes", len(frame.Payload))
			}
			out = AppendFrame(out, frame.Type, frame.Payload)
			in = in[size:]
		}
	}
	return out, nil
}
