package streaming

import (
	"bytes"
	"net"
	"testing"

	"berth/internal/testutil"
)

// connected returns both ends of a TCP connection.
func connected(t *testing.T) (ours *connection, theirs *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	testutil.Must(t, err)
	server, err := l.Accept()
	testutil.Must(t, err)
	t.Cleanup(func() { client.Close(); server.Close() })
	return &connection{TCPConn: server.(*net.TCPConn)}, client.(*net.TCPConn)
}

func watching(t *testing.T) *hangups {
	t.Helper()
	h, err := watchHangups()
	testutil.Must(t, err)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
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
		testutil.Must(t, err)
		if _, err := theirs.Write(bytes.Repeat([]byte("x"), 1<<16)); err != nil {
			t.Fatal(err)
		}
		select {
		case <-gone:
			t.Fatal("reported a client that is still connected")
		default:
		}
		testutil.Must(t, theirs.Close())
		<-gone
		forget()
	}
}

func TestForgottenConnectionsAreNotReported(t *testing.T) {
	h := watching(t)
	first, firstTheirs := connected(t)
	second, secondTheirs := connected(t)
	forget, err := h.add(first, func() { t.Error("reported a forgotten connection") })
	testutil.Must(t, err)
	gone := make(chan struct{})
	forgetSecond, err := h.add(second, func() { close(gone) })
	testutil.Must(t, err)
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
	testutil.Must(t, err)
	testutil.Must(t, ours.Close())
	_ = ours.Close() // again
	forget()
	if calls != 1 {
		t.Errorf("reported %d times", calls)
	}
	if _, err := h.add(ours, func() { calls++ }); err == nil {
		t.Error("a closed connection is watched")
	}
}
