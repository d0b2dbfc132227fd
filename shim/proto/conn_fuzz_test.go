package proto

import (
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"testing"
	"time"
)

// FuzzReceive checks that bytes of a broken peer give an error or a message and never take more
// memory than they have, and that messages arrive unchanged.
func FuzzReceive(f *testing.F) {
	f.Add([]byte{0, 0, 0, 2, '{', '}'}, "w")
	f.Add([]byte{0, 0, 0, 4, 'n', 'u', 'l', 'l', 0, 0, 0, 1}, "")
	f.Add([]byte{0xff, 0, 0, 0, '{'}, "\xff\x00")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		a, b := pair(t)
		sent := Reply{Warnings: []string{text}, Exited: &Exited{Code: int32(len(text))}}
		if err := a.Send(sent); err != nil {
			t.Fatal(err)
		}
		var got, want Reply
		if _, err := b.Receive(&got); err != nil {
			t.Fatal(err)
		}
		through(t, sent, &want) // JSON has no invalid UTF-8
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%+v became %+v", sent, got)
		}
		if len(data) > 100<<10 {
			t.Skip("more than the socket takes at once")
		}
		if _, err := a.unix.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(a.CloseWrite(), b.SetDeadline(time.Now().Add(time.Minute))); err != nil {
			t.Fatal(err)
		}
		for range len(data) + 1 {
			var reply Reply
			files, err := b.Receive(&reply)
			if len(files) > 0 {
				t.Fatalf("files %v", files)
			}
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				if len(b.in) > headerSize+maxMessage {
					t.Fatalf("%d bytes are held", len(b.in))
				}
				return // the caller closes the connection
			}
		}
		t.Fatal("more messages than bytes")
	})
}

func through(t *testing.T, from, to any) {
	t.Helper()
	text, err := json.Marshal(from)
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}
