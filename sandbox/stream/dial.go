package stream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/netns"
)

// dialTime is how long a port may take to accept a connection, at each address.
const dialTime = 10 * time.Second

// dialLimiter bounds the connections to pods that are being made at a time, for all clients together, and for each pod to half of that: a
// port that swallows what is sent to it holds up its own pod's. The lock guards the map and the users in it.
type dialLimiter struct {
	places *semaphore.Weighted
	mu     sync.Mutex
	pods   map[string]*podDials
}

// podDials are the connections to a pod that are being made, or wait for that.
type podDials struct {
	places *semaphore.Weighted
	users  int
}

const (
	// maxDials is what there is room for. A port that accepts does so in less than a millisecond; one that does not would
	// otherwise have as many descriptors as clients ask for.
	maxDials    = 256
	maxPodDials = maxDials / 2
)

// newDialLimiter returns a bound that nobody uses.
func newDialLimiter() *dialLimiter {
	return &dialLimiter{places: semaphore.NewWeighted(maxDials), pods: map[string]*podDials{}}
}

// take waits for a place, the pod's first: who waits for that has no place of all pods'.
func (d *dialLimiter) take(ctx context.Context, pod string) (release func(), err error) {
	own := d.enter(pod)
	if err := own.places.Acquire(ctx, 1); err != nil {
		d.leave(pod, own)
		return nil, errdefs.Unavailable("connect: wait for %d other connections to the pod to be made: %w", maxPodDials, err)
	}
	if err := d.places.Acquire(ctx, 1); err != nil {
		own.places.Release(1)
		d.leave(pod, own)
		return nil, errdefs.Unavailable("connect: wait for %d other connections to be made: %w", maxDials, err)
	}
	return func() {
		d.places.Release(1)
		own.places.Release(1)
		d.leave(pod, own)
	}, nil
}

func (d *dialLimiter) enter(pod string) *podDials {
	d.mu.Lock()
	defer d.mu.Unlock()
	own := d.pods[pod]
	if own == nil {
		own = &podDials{places: semaphore.NewWeighted(maxPodDials)}
		d.pods[pod] = own
	}
	own.users++
	return own
}

func (d *dialLimiter) leave(pod string, own *podDials) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if own.users--; own.users == 0 {
		delete(d.pods, pod)
	}
}

// dial connects to a port at a pod's localhost, as seen in its network namespace, the host's if netnsPath is empty.
func (d *dialLimiter) dial(ctx context.Context, pod, netnsPath string, port uint16) (*net.TCPConn, error) {
	release, err := d.take(ctx, pod)
	if err != nil {
		return nil, err
	}
	defer release()
	var all error
	for _, localhost := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		address := netip.AddrPortFrom(localhost, port)
		conn, err := dialAddress(ctx, netnsPath, address)
		if err == nil {
			return conn, nil
		}
		all = errors.Join(all, fmt.Errorf("%v: %w", address, err))
	}
	return nil, errdefs.Unavailable("connect: %w", all)
}

// dialAddress waits for the connection outside of the namespace: what enters one has a thread of its own, and is not to wait. A
// socket belongs to the namespace that it was made in.
func dialAddress(ctx context.Context, netnsPath string, address netip.AddrPort) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	var socket *os.File
	open := func() (err error) { socket, err = newSocket(address.Addr()); return err }
	var err error
	if netnsPath == "" {
		err = open()
	} else {
		err = netns.In(netnsPath, open)
	}
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	if err := connect(ctx, socket, address); err != nil {
		return nil, err
	}
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

func newSocket(address netip.Addr) (*os.File, error) {
	family := unix.AF_INET
	if address.Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	return os.NewFile(uintptr(fd), "forwarded connection"), nil
}

// connect waits on Go's poller, which has no thread for it.
func connect(ctx context.Context, socket *os.File, address netip.AddrPort) error {
	defer context.AfterFunc(ctx, func() { _ = socket.SetWriteDeadline(time.Unix(1, 0)) })() // it fails if socket is closed, when nobody waits
	conn, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var connectErr error
	err = conn.Write(func(fd uintptr) (done bool) {
		switch connectErr = unix.Connect(int(fd), sockaddr(address)); connectErr {
		case unix.EINPROGRESS, unix.EALREADY, unix.EINTR:
			return false
		case unix.EISCONN:
			connectErr = nil
		}
		return true
	})
	if err != nil { // the deadline
		return errors.Join(ctx.Err(), err)
	}
	return os.NewSyscallError("connect", connectErr)
}

func sockaddr(address netip.AddrPort) unix.Sockaddr {
	if address.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(address.Port()), Addr: address.Addr().As16()}
}
