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

// dialTimeout limits how long a port may take to accept a connection, per address.
const dialTimeout = 10 * time.Second

// dialLimiter limits the connections to pods that are being opened, in total and per pod. A pod may
// use half of the slots, so a port that drops packets delays only connections to its pod. The lock
// guards the map and its users fields.
type dialLimiter struct {
	slots *semaphore.Weighted
	mu    sync.Mutex
	// +checklocks:mu
	pods map[string]*podDials
}

// podDials limits the connections to one pod. users counts the open and waiting connections.
type podDials struct {
	slots *semaphore.Weighted
	users int
}

const (
	// maxDials limits concurrent dials. A working port accepts within a millisecond. If there were
	// no limit, clients of an unresponsive port could hold any number of descriptors.
	maxDials    = 256
	maxPodDials = maxDials / 2
)

// newDialLimiter returns an unused limiter.
func newDialLimiter() *dialLimiter {
	return &dialLimiter{slots: semaphore.NewWeighted(maxDials), pods: map[string]*podDials{}}
}

// take waits for a slot of the pod and then for a shared slot. So connections that wait for a busy
// pod hold no shared slot.
func (d *dialLimiter) take(ctx context.Context, pod string) (release func(), err error) {
	own := d.enter(pod)
	if err := own.slots.Acquire(ctx, 1); err != nil {
		d.leave(pod, own)
		return nil, errdefs.Unavailable("connect: wait for %d other connections to the pod: %w", maxPodDials, err)
	}
	if err := d.slots.Acquire(ctx, 1); err != nil {
		own.slots.Release(1)
		d.leave(pod, own)
		return nil, errdefs.Unavailable("connect: wait for %d other connections: %w", maxDials, err)
	}
	return func() {
		d.slots.Release(1)
		own.slots.Release(1)
		d.leave(pod, own)
	}, nil
}

func (d *dialLimiter) enter(pod string) *podDials {
	d.mu.Lock()
	defer d.mu.Unlock()
	own := d.pods[pod]
	if own == nil {
		own = &podDials{slots: semaphore.NewWeighted(maxPodDials)}
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

// dial connects to a port on localhost in a pod's network namespace, or in the host's if netnsPath
// is empty.
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

// dialAddress opens the socket in the namespace and connects outside of it. A thread must stay in
// the namespace until the function returns, so waiting there would occupy a thread. A socket keeps
// the namespace in which it was opened.
func dialAddress(ctx context.Context, netnsPath string, address netip.AddrPort) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
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

// connect waits on Go's poller and so occupies no thread.
func connect(ctx context.Context, socket *os.File, address netip.AddrPort) error {
	defer context.AfterFunc(ctx, func() {
		_ = socket.SetWriteDeadline(time.Unix(1, 0))
	})() // fails after socket is closed, which is harmless
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
	if err != nil { // the deadline expired
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
