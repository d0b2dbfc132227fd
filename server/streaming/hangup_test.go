package streaming

import (
	"bytes"
	"net"
	"testing"
)

// connected returns both ends of a TCP connection.
func connected(t *testing.T) (ours *connection, theirs *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	return &connection{TCPConn: server.(*net.TCPConn)}, client.(*net.TCPConn)
}

func watching(t *testing.T) *hangups {
	t.Helper()
	h, err := watchHangups()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		if len(h.waiting) > 0 {
			t.Errorf("%d connections are still waited for", len(h.waiting))
		}
	})
	return h
}

// A hang-up is detected behind much unread data.
func TestHangupIsDetectedBehindUnreadData(t *testing.T) {
	h := watching(t)
	for range 40 { // more than one epoll_wait returns
		ours, theirs := connected(t)
		gone := make(chan struct{})
		forget, err := h.add(ours, func() { close(gone) })
		if err != nil {
			t.Fatal(err)
		}
		if _, err := theirs.Write(bytes.Repeat([]byte("x"), 1<<16)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-gone:
			t.Fatal("reported a client that is still connected")
		default:
		}
		if err := theirs.Close(); err != nil {
			t.Fatal(err)
		}
		<-gone
		forget()
	}
}

func TestForgottenConnectionsAreNotReported(t *testing.T) {
	h := watching(t)
	first, firstTheirs := connected(t)
	second, secondTheirs := connected(t)
	forget, err := h.add(first, func() { t.Error("reported a forgotten connection") })
	if err != nil {
		t.Fatal(err)
	}
	gone := make(chan struct{})
	forgetSecond, err := h.add(second, func() { close(gone) })
	if err != nil {
		t.Fatal(err)
	}
	forget()
	firstTheirs.Close()
	secondTheirs.Close()
	<-gone
	forgetSecond()
}

// A connection that this side closes first is reported too.
func TestCloseIsReported(t *testing.T) {
	h := watching(t)
	ours, _ := connected(t)
	calls := 0
	forget, err := h.add(ours, func() { calls++ })
	if err != nil {
		t.Fatal(err)
	}
	if err := ours.Close(); err != nil {
		t.Fatal(err)
	}
	_ = ours.Close() // again
	forget()
	if calls != 1 {
		t.Errorf("reported %d times", calls)
	}
	if _, err := h.add(ours, func() { calls++ }); err == nil {
		t.Error("a closed connection is watched")
	}
}
