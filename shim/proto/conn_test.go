package proto

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

func pair(t *testing.T) (*Conn, *Conn) {
	t.Helper()
	a, file, err := ConnPair()
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewConn(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func TestMessagesAndFiles(t *testing.T) {
	a, b := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	long := strings.Repeat("x", 1<<20) // more than a socket buffer
	sent := make(chan error, 1)
	go func() {
		sent <- errors.Join(
			a.Send(Reply{Exited: &Exited{Code: 7}}),
			a.Send(Reply{Warnings: []string{long}}, w),
			a.Send(Reply{Exec: &ExecStarted{PID: 9}}),
			w.Close(),
		)
	}()

	var first, second, third Reply
	if files, err := b.Receive(&first); err != nil || len(files) != 0 || first.Exited.Code != 7 {
		t.Fatalf("first = %+v, %v, %v", first, files, err)
	}
	files, err := b.Receive(&second)
	if err != nil || len(files) != 1 || second.Warnings[0] != long {
		t.Fatalf("second: files %v, %v", files, err)
	}
	if _, err := b.Receive(&third); err != nil || third.Exec.PID != 9 {
		t.Fatalf("third = %+v, %v", third, err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if _, err := files[0].WriteString("through"); err != nil {
		t.Fatal(err)
	}
	files[0].Close()
	if got, err := io.ReadAll(r); string(got) != "through" || err != nil {
		t.Errorf("the pipe gave %q, %v", got, err)
	}
}

func TestTimeoutLosesNothing(t *testing.T) {
	a, b := pair(t)
	body := []byte(`{"exited":{"code":3}}`)
	message := append([]byte{0, 0, 0, byte(len(body))}, body...)
	if _, err := a.unix.Write(message[:9]); err != nil {
		t.Fatal(err)
	}
	if err := b.SetDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	var r Reply
	if _, err := b.Receive(&r); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("Receive = %v, want a timeout", err)
	}
	if err := b.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.unix.Write(message[9:]); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Receive(&r); err != nil || r.Exited.Code != 3 {
		t.Errorf("Receive = %+v, %v", r, err)
	}
}

func TestReceiveReturnsEOF(t *testing.T) {
	a, b := pair(t)
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	var r Reply
	if _, err := b.Receive(&r); err != io.EOF {
		t.Errorf("Receive = %v, want io.EOF", err)
	}
	if err := b.Send(Reply{Exited: &Exited{Code: 1}}); err != nil {
		t.Fatalf("the other direction: %v", err)
	}
	if _, err := a.Receive(&r); err != nil {
		t.Errorf("the other direction: %v", err)
	}
}

func TestBadMessages(t *testing.T) {
	for _, tt := range []struct{ name, data, want string }{
		{"too long", "\xff\xff\xff\xff", "too long"},
		{"cut", "\x00\x00\x00\x10{}", "EOF"},
		{"not JSON", "\x00\x00\x00\x02{]", "decode"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := pair(t)
			if _, err := a.unix.Write([]byte(tt.data)); err != nil {
				t.Fatal(err)
			}
			a.Close()
			var r Reply
			if _, err := b.Receive(&r); err == nil || err == io.EOF || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Receive = %v, want an error with %q", err, tt.want)
			}
		})
	}
}

// A sender can see whether the other end reads.
func TestUnreadReportsPendingBytes(t *testing.T) {
	a, b := pair(t)
	unread := func() int {
		t.Helper()
		n, err := a.Unread()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := unread(); n != 0 {
		t.Errorf("%d bytes unread of nothing", n)
	}
	if err := a.Send(Request{Kill: "x"}); err != nil {
		t.Fatal(err)
	}
	if unread() == 0 {
		t.Error("nothing is unread")
	}
	if _, err := b.Receive(&Request{}); err != nil {
		t.Fatal(err)
	}
	if n := unread(); n != 0 {
		t.Errorf("%d bytes unread of what was read", n)
	}
}

// Send returns when the other end does not make room for a message.
func TestSendFailsWithoutReader(t *testing.T) {
	a, _ := pair(t)
	a.sendTimeout = time.Millisecond
	if err := a.Send(Request{Kill: strings.Repeat("x", 1<<20)}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Send = %v", err)
	}
}
