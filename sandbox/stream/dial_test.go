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
)

// deaf listens at localhost and has room for no connection more: those to come hang.
func deaf(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	localhost := [4]byte{127, 0, 0, 1}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: localhost}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := netip.AddrPortFrom(netip.AddrFrom4(localhost), uint16(name.(*unix.SockaddrInet4).Port))
	first, err := dialAddress(t.Context(), "", address) // a backlog of 0 has room for one
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { first.Close() })
	return address
}

// threads counts those of this process.
func threads(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// dialOwn connects to a port that accepts.
func dialOwn(t *testing.T, d *dialLimiter, pod string) error {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := d.dial(t.Context(), pod, "", l.Addr().(*net.TCPAddr).AddrPort().Port())
	if err == nil {
		err = conn.Close()
	}
	return err
}

// Connections that hang in pods' namespaces have no threads, there is a bound for them that leaves places for other pods, and they end
// with their clients.
func TestHangingDialsHaveNoThreads(t *testing.T) {
	address := deaf(t)
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
	for own.places.TryAcquire(1) { // until all that there is room for are waiting
		own.places.Release(1)
	}
	d.leave("pod", own)
	if now := threads(t); now > before+maxPodDials/2 {
		t.Errorf("%d threads more for %d connections", now-before, maxPodDials)
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
	if !d.places.TryAcquire(maxDials) || len(d.pods) != 0 {
		t.Errorf("not all places were given back: %v", d.pods)
	}
}

func TestDial(t *testing.T) {
	for _, localhost := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", localhost)
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).AddrPort().Port()
		for _, netns := range []string{"", "/proc/self/ns/net"} {
			conn, err := newDialLimiter().dial(t.Context(), "pod", netns, port)
			if err != nil {
				t.Fatalf("%s: %v", localhost, err)
			}
			if got := conn.RemoteAddr().String(); got != l.Addr().String() {
				t.Errorf("connected to %s, want %s", got, l.Addr())
			}
			conn.Close()
		}
		l.Close()
		if _, err := newDialLimiter().dial(t.Context(), "pod", "", port); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("nobody listens: %v", err)
		}
	}
}
