package wire

import (
	"bytes"
	"testing"
)

func TestNext(t *testing.T) {
	stream := Append(Append(nil, Stdin, []byte("hello")), Reopen, nil)
	for cut := range HeaderSize + 5 {
		if _, size, err := Next(stream[:cut]); size != 0 || err != nil {
			t.Errorf("Next of %d bytes = %d, %v, want more to be asked for", cut, size, err)
		}
	}
	f, size, err := Next(stream)
	if f.Type != Stdin || string(f.Payload) != "hello" || size != HeaderSize+5 || err != nil {
		t.Errorf("Next = %+v, %d, %v", f, size, err)
	}
	f, size, err = Next(stream[size:])
	if f.Type != Reopen || len(f.Payload) != 0 || size != HeaderSize || err != nil {
		t.Errorf("Next = %+v, %d, %v", f, size, err)
	}
	if _, _, err := Next(Header(nil, Stdin, MaxPayload+1)); err == nil {
		t.Error("a frame beyond the maximum was accepted")
	}
}

func TestSize(t *testing.T) {
	want := Size{Width: 300, Height: 50}
	if got, err := DecodeSize(want.Encode()); got != want || err != nil {
		t.Errorf("DecodeSize = %+v, %v", got, err)
	}
	if _, err := DecodeSize([]byte{1, 2, 3}); err == nil {
		t.Error("three bytes were accepted")
	}
}

// FuzzNext: what is decoded encodes to the same bytes, however they arrive.
func FuzzNext(f *testing.F) {
	f.Add(Append(nil, Attach, []byte{byte(WantStdin | WantStdout)}), 1)
	f.Add(Append(Append(nil, Resize, Size{80, 25}.Encode()), CloseStdin, nil), 7)
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

// frames decodes what arrives piece by piece, as a monitor does, and returns the frames encoded again.
func frames(t *testing.T, data []byte, piece int) (out []byte, err error) {
	t.Helper()
	var in []byte
	for len(data) > 0 {
		n := min(piece, len(data))
		in, data = append(in, data[:n]...), data[n:]
		for {
			frame, size, err := Next(in)
			if err != nil {
				return out, err
			}
			if size == 0 {
				break
			}
			if len(frame.Payload) > MaxPayload {
				t.Fatalf("a payload of %d bytes", len(frame.Payload))
			}
			out = Append(out, frame.Type, frame.Payload)
			if size, err := DecodeSize(frame.Payload); err == nil && !bytes.Equal(size.Encode(), frame.Payload) {
				t.Fatalf("%v from %q", size, frame.Payload)
			}
			in = in[size:]
		}
	}
	return out, nil
}
