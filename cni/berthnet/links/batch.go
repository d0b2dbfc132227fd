package links

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// answerTimeout bounds the wait for one answer of the kernel, in seconds. The kernel answers after
// the change, which may wait for other network changes (the RTNL lock).
const answerTimeout = 60

// batch is a series of routing netlink requests that are sent with one system call. The kernel
// answers each request, and processes all of them even after a failure.
type batch struct {
	steps []step
}

type step struct {
	what    string
	request *nl.NetlinkRequest
	passed  unix.Errno // an errno that counts as success; 0: none
}

// add appends a request. Errors of the request begin with what.
func (b *batch) add(what string, kind uint16, flags int, data ...nl.NetlinkRequestData) *nl.NetlinkRequest {
	request := nl.NewNetlinkRequest(int(kind), flags|unix.NLM_F_ACK)
	for _, d := range data {
		request.AddData(d)
	}
	b.steps = append(b.steps, step{what: what, request: request})
	return request
}

// pass makes the last request succeed if its error is e.
func (b *batch) pass(e unix.Errno) { b.steps[len(b.steps)-1].passed = e }

// do sends the requests from the thread's network namespace and waits for all answers. It returns
// the error of the first failed request, which wraps a unix.Errno.
func (b *batch) do() error {
	socket, err := open()
	if err != nil {
		return err
	}
	err = b.doOn(socket)
	return errors.Join(err, unix.Close(socket))
}

// open returns a socket in the thread's network namespace.
func open() (socket int, err error) {
	socket, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("open netlink: %w", err)
	}
	for _, option := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} { // short answers, with error messages
		if err == nil {
			err = unix.SetsockoptInt(socket, unix.SOL_NETLINK, option, 1)
		}
	}
	if err == nil {
		err = unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerTimeout})
	}
	if err == nil {
		err = unix.Bind(socket, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("open netlink: %w", err), unix.Close(socket))
	}
	return socket, nil
}

func (b *batch) doOn(socket int) error {
	var message []byte
	for i, s := range b.steps {
		s.request.Seq = uint32(i + 1)
		message = append(message, s.request.Serialize()...)
	}
	if err := unix.Sendto(socket, message, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send netlink requests: %w", err)
	}
	failures := make([]error, len(b.steps))
	buffer := make([]byte, os.Getpagesize())
	for answered := 0; answered < len(b.steps); {
		n, err := receive(socket, buffer)
		if err != nil {
			return fmt.Errorf("read netlink answers: %w", err)
		}
		if answered, err = b.answers(buffer[:n], answered, failures); err != nil {
			return err
		}
	}
	for i, err := range failures {
		if err != nil && (b.steps[i].passed == 0 || !errors.Is(err, b.steps[i].passed)) {
			return fmt.Errorf("%s: %w", b.steps[i].what, err)
		}
	}
	return nil
}

func receive(socket int, buffer []byte) (n int, err error) {
	for {
		n, from, err := unix.Recvfrom(socket, buffer, 0)
		if err == unix.EINTR {
			continue
		}
		if err == unix.EAGAIN {
			return 0, fmt.Errorf("no netlink answer within %d s", answerTimeout)
		}
		if sender, ok := from.(*unix.SockaddrNetlink); err == nil && (!ok || sender.Pid != nl.PidKernel) {
			continue // not from the kernel
		}
		return n, err
	}
}

// answers reads acknowledgements and returns the number of answered requests.
func (b *batch) answers(data []byte, answered int, failures []error) (int, error) {
	for len(data) >= unix.NLMSG_HDRLEN {
		order := nl.NativeEndian()
		length, kind, flags := int(order.Uint32(data)), order.Uint16(data[4:]), order.Uint16(data[6:])
		seq := int(order.Uint32(data[8:]))
		if length < unix.NLMSG_HDRLEN+4 || length > len(data) || kind != unix.NLMSG_ERROR || seq < 1 || seq > len(failures) {
			return answered, fmt.Errorf("read netlink answers: unexpected message type %d", kind)
		}
		body := data[unix.NLMSG_HDRLEN:length]
		if code := int32(order.Uint32(body)); code != 0 {
			failures[seq-1] = explained(unix.Errno(-code), body, flags)
		}
		answered++
		data = data[min(align(length), len(data)):]
	}
	return answered, nil
}

// explained adds the kernel's message to an errno.
func explained(errno unix.Errno, body []byte, flags uint16) error {
	const echoed = 4 + unix.NLMSG_HDRLEN // the answer repeats only the request's header (NETLINK_CAP_ACK)
	if flags&unix.NLM_F_ACK_TLVS == 0 || len(body) < echoed {
		return errno
	}
	attrs, err := nl.ParseRouteAttr(body[echoed:])
	if err != nil {
		return errno
	}
	for _, a := range attrs {
		if a.Attr.Type == unix.NLMSGERR_ATTR_MSG {
			return fmt.Errorf("%w: %s", errno, strings.TrimRight(string(a.Value), "\x00"))
		}
	}
	return errno
}

func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }
