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

func FuzzNext(f *testing.F) {
	f.Add(Append(nil, Attach, []byte{byte(WantStdin | WantStdout)}))
	f.Add(Append(Append(nil, Resize, Size{80, 25}.Encode()), CloseStdin, nil))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		for {
			frame, size, err := Next(data)
			if err != nil || size == 0 {
				return
			}
			if size > len(data) || !bytes.Equal(Append(nil, frame.Type, frame.Payload), data[:size]) {
				t.Fatalf("Next(%q) = %+v, %d", data, frame, size)
			}
			data = data[size:]
		}
	})
}
