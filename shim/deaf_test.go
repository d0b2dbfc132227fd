package shim

import (
	"errors"
	"os"
	"testing"
	"time"

	"berth/shim/control"
)

// A launcher that reads and replies while it is being given up is not, and what it says next is waited for.
func TestReplyAtTheLastMoment(t *testing.T) {
	conn, file, err := control.Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	theirs, err := control.New(file)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	if err := conn.Send(control.Request{Kill: "x"}); err != nil {
		t.Fatal(err)
	}
	h := (&launcher{conn: conn}).listen(time.Hour)
	h.look()
	if _, err := conn.Receive(&control.Reply{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one that reads nothing: %v", err)
	}
	if err := h.result(nil); err != nil { // as if the reply had been faster
		t.Errorf("one that has replied: %v", err)
	}
	if err := theirs.Send(control.Reply{Exited: &control.Exited{Code: 7}}); err != nil {
		t.Fatal(err)
	}
	var next control.Reply
	if _, err := conn.Receive(&next); err != nil || next.Exited.Code != 7 {
		t.Errorf("the next reply is %+v: %v", next, err)
	}
}
