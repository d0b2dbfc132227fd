package stream

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// unresponsive returns a listener on localhost with a full backlog: further connections hang.
func unresponsive(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.Must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	localhost := [4]byte{127, 0, 0, 1}
	testutil.Must(t, errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: localhost}), unix.Listen(fd, 0)))
	name, err := unix.Getsockname(fd)
	testutil.Must(t, err)
	address := netip.AddrPortFrom(netip.AddrFrom4(localhost), uint16(name.(*unix.SockaddrInet4).Port))
	first, err := dialAddress(t.Context(), "", address) // a backlog of 0 holds one connection
	testutil.Must(t, err)
	t.Cleanup(func() { first.Close() })
	return address
}

// threads returns the number of threads of this process.
func threads(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	testutil.Must(t, err)
	return len(entries)
}

// dialOwn connects to a port that accepts.
func dialOwn(t *testing.T, d *dialLimiter, pod string) error {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	defer l.Close()
	conn, err := d.dial(t.Context(), pod, "", l.Addr().(*net.TCPAddr).AddrPort().Port())
	if err == nil {
		err = conn.Close()
	}
	return err
}

// Hanging connections hold no threads, leave slots for other pods and end with their clients.
func TestHangingDialsHoldNoThreads(t *testing.T) {
	testutil.NeedRoot(t)
	address := unresponsive(t)
	d := newDialLimiter()
	before := threads(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var running sync.WaitGroup
	errs := make(chan error, 2*maxDials)
	for range 2 * maxDials {
		running.Go(func() {
			_, err := d.dial(ctx, "pod", "/proc/self/ns/net", address.Port())
			errs <- err
		})
	}
	own := d.enter("pod")
	for own.slots.TryAcquire(1) { // until every slot has a waiting dial
		own.slots.Release(1)
	}
	d.leave("pod", own)
	if now := threads(t); now > before+maxPodDials/2 {
		t.Errorf("%d additional threads for %d connections", now-before, maxPodDials)
	}
	if err := dialOwn(t, d, "other"); err != nil {
		t.Errorf("another pod: %v", err)
	}
	cancel()
	running.Wait()
	close(errs)
	for err := range errs {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	}
	if !d.slots.TryAcquire(maxDials) || len(d.pods) != 0 {
		t.Errorf("not all slots were released: %v", d.pods)
	}
}

func TestDial(t *testing.T) {
	testutil.NeedRoot(t)
	for _, localhost := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(localhost, func(t *testing.T) {
			l, err := net.Listen("tcp", localhost)
			testutil.Must(t, err)
			port := l.Addr().(*net.TCPAddr).AddrPort().Port()
			for _, netns := range []string{"", "/proc/self/ns/net"} {
				conn, err := newDialLimiter().dial(t.Context(), "pod", netns, port)
				testutil.Must(t, err)
				if got := conn.RemoteAddr().String(); got != l.Addr().String() {
					t.Errorf("connected to %s, want %s", got, l.Addr())
				}
				conn.Close()
			}
			l.Close()
			if _, err := newDialLimiter().dial(t.Context(), "pod", "", port); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("closed port: %v", err)
			}
		})
	}
}
