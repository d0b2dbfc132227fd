package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"berth/shim/handoff"
	"berth/shim/wire"
)

// talk is a monitor without a container, with one client at the other end of a socket and a
// pipe for stdin that holds less than a client may send.
type talk struct {
	m      *monitor
	client int
	stdin  int // read end
}

func newTalk(t *testing.T, once bool) *talk {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var pipe [2]int
	must(unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	_, err := unix.FcntlInt(uintptr(pipe[1]), unix.F_SETPIPE_SZ, 4096)
	must(err)
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(err)
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	must(err)
	m := &monitor{params: handoff.Params{Init: -1, Listen: -1, Console: -1, StdinOnce: once}, log: -1, epoll: epoll, oom: oom{file: -1, notify: -1, parent: -1}}
	m.stdin.fd = pipe[1]
	m.clients = []*client{{fd: ends[0]}}
	must(m.watch(ends[0], unix.EPOLLIN))
	k := &talk{m: m, client: ends[1], stdin: pipe[0]}
	t.Cleanup(func() {
		for _, c := range m.clients {
			c.dead = true
		}
		m.sweep()
		m.shutStdin()
		for _, fd := range []int{k.client, k.stdin, epoll} {
			if fd >= 0 {
				must(unix.Close(fd))
			}
		}
	})
	return k
}

// step has the monitor handle what has happened, and tells whether there was something.
func (k *talk) step(t *testing.T) bool {
	t.Helper()
	var events [16]unix.EpollEvent
	n, err := unix.EpollWait(k.m.epoll, events[:], 0)
	if err != nil && err != unix.EINTR {
		t.Fatal(err)
	}
	for _, e := range events[:max(n, 0)] {
		k.m.handle(int(e.Fd), e.Events)
	}
	k.m.sweep()
	for _, c := range k.m.clients {
		if len(c.in) > wire.HeaderSize+wire.MaxPayload || c.queued > maxQueued {
			t.Fatalf("%d bytes are held for a client, and %d of its answers", len(c.in), c.queued)
		}
	}
	return n > 0
}

// drain reads what there is.
func drain(t *testing.T, fd int) (all []byte, ended bool) {
	t.Helper()
	buffer := make([]byte, 64<<10)
	for {
		switch n, err := unix.Read(fd, buffer); {
		case err == unix.EAGAIN:
			return all, false
		case err != nil && !errors.Is(err, unix.ECONNRESET):
			t.Fatal(os.NewSyscallError("read", err))
		case n <= 0:
			return all, true
		default:
			all = append(all, buffer[:n]...)
		}
	}
}

// FuzzClient sends arbitrary bytes to a monitor: each request is answered, in order, and the container gets
// what was sent for it, once; whatever comes the monitor ends the connection in the end.
func FuzzClient(f *testing.F) {
	hello := wire.Append(wire.Append(wire.Append(nil, wire.Attach, []byte{byte(wire.WantStdin)}), wire.Stdin, []byte("hello")), wire.StdinEOF, nil)
	f.Add(hello, 100, false)
	f.Add(wire.Append(wire.Append(hello, wire.Stdin, []byte("late")), wire.CloseStdin, nil), 3, true)
	f.Add(wire.Append(wire.Append(nil, wire.Attach, []byte{7}), wire.Stdin, bytes.Repeat([]byte("x"), 10_000)), 4000, false)
	f.Add(wire.Append(wire.Append(wire.Append(nil, wire.Attach, nil), wire.Resize, wire.Size{Width: 1}.Encode()), wire.Reopen, nil), 9, false)
	f.Add([]byte{2, 0xff, 0xff, 0xff, 0xff, 0}, 1, false)
	f.Fuzz(func(t *testing.T, data []byte, piece int, once bool) {
		piece = 1 + int(uint(piece)%40_000)
		k := newTalk(t, once)
		answers, input := wanted(data, once)
		var gotAnswers, gotInput []byte
		collect := func() {
			for k.step(t) {
			}
			said, _ := drain(t, k.client)
			gotAnswers = append(gotAnswers, said...)
			taken, _ := drain(t, k.stdin)
			gotInput = append(gotInput, taken...)
		}
		rest := data
		for len(rest) > 0 {
			n, err := unix.Write(k.client, rest[:min(piece, len(rest))])
			if err == unix.EPIPE || err == unix.ECONNRESET {
				break // it was told something that it does not understand
			}
			if err != nil && err != unix.EAGAIN {
				t.Fatal(err)
			}
			rest = rest[max(n, 0):]
			collect()
		}
		if err := unix.Shutdown(k.client, unix.SHUT_WR); err != nil && err != unix.ENOTCONN {
			t.Fatal(err)
		}
		for range len(data)/4096 + 8 { // stdin's pipe holds 4096 bytes
			collect()
		}
		if len(k.m.clients) > 0 {
			t.Fatalf("the client is still there, with %d bytes", len(k.m.clients[0].in))
		}
		if kinds := kindsOf(t, gotAnswers); !bytes.Equal(kinds, answers) {
			t.Errorf("answers %v, want %v", kinds, answers)
		}
		if !bytes.Equal(gotInput, input) {
			t.Errorf("the container got %d bytes %.50q, want %d", len(gotInput), gotInput, len(input))
		}
	})
}

// wanted is what a client's requests must bring: the kinds of the answers, and the container's input.
func wanted(data []byte, once bool) (answers, input []byte) {
	var attached, feeds, closed bool
	for {
		frame, size, err := wire.Next(data)
		if size == 0 || err != nil {
			return answers, input
		}
		data = data[size:]
		answer := wire.OK
		switch frame.Type {
		case wire.Stdin:
			if feeds && !closed {
				input = append(input, frame.Payload...)
			}
			continue
		case wire.StdinEOF:
			closed = closed || feeds && once
			feeds = false
			continue
		case wire.Attach:
			if attached || len(frame.Payload) != 1 {
				answer = wire.Error
				break
			}
			attached, feeds = true, wire.Streams(frame.Payload[0])&wire.WantStdin != 0
		case wire.CloseStdin:
			closed = true
		case wire.Reopen: // there is no log
		default: // a size, without a terminal, or nothing known
			answer = wire.Error
		}
		answers = append(answers, byte(answer))
	}
}

func kindsOf(t *testing.T, data []byte) (kinds []byte) {
	t.Helper()
	for len(data) > 0 {
		frame, size, err := wire.Next(data)
		if size == 0 || err != nil {
			t.Fatalf("%v in %q", errors.Join(err, io.ErrUnexpectedEOF), data)
		}
		kinds = append(kinds, byte(frame.Type))
		data = data[size:]
	}
	return kinds
}
