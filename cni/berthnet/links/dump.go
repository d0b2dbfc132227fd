package links

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// How often a list is asked for that changes while the kernel gives it out, and the pauses in between, which grow: what changes it comes in bursts. They take
// a fifth of a second together.
const (
	dumpAttempts   = 10
	firstDumpPause = time.Millisecond
	lastDumpPause  = 50 * time.Millisecond
)

// dump asks for a list of the kernel's until it comes whole. The kernel gives a long one out in pieces, and says so (NLM_F_DUMP_INTR) where it was changed
// in between, by whatever pod comes or goes; the library returns what it has, with ErrDumpInterrupted, and what is missing in it nobody knows.
func dump[T any](ask func() ([]T, error)) (all []T, err error) {
	pause := firstDumpPause
	for attempt := range dumpAttempts {
		if attempt > 0 {
			time.Sleep(pause)
			pause = min(2*pause, lastDumpPause)
		}
		if all, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}

// addressesOf returns the addresses of the interface with an index, of IPv4 and IPv6, with the lengths of their subnets. Errors wrap the kernel's: ENODEV where there
// is no such interface, but none before Linux 4.20.
func addressesOf(index int) (all []netip.Prefix, err error) {
	messages, err := dump(func() ([][]byte, error) { return askAddresses(index) })
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		p, ok, err := parseAddress(m, index)
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, p)
		}
	}
	return all, nil
}

// askAddresses returns the kernel's messages about one interface's addresses, which fit into one piece, so that nothing interrupts them. Those of all
// interfaces, which older kernels give (before Linux 4.20), come in many where a proxy has an address for each service (kube-ipvs0) or other networks' pods have some on the node.
func askAddresses(index int) ([][]byte, error) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE) // to nothing: it is the thread's namespace's, and a socket of our own, for its option
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	err = unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1) // or the index in a request counts for nothing
	if err != nil && !errors.Is(err, unix.ENOPROTOOPT) {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	if err := socket.SetReceiveTimeout(&unix.Timeval{Sec: answerTimeout}); err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETADDR, unix.NLM_F_DUMP)
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
	message := nl.NewIfAddrmsg(unix.AF_UNSPEC)
	message.Index = uint32(index)
	request.AddData(message)
	return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWADDR)
}

// parseAddress reads a message about an address; ok is false where it is another interface's, or of another family. An address with a peer is alone in its subnet.
func parseAddress(data []byte, index int) (p netip.Prefix, ok bool, err error) {
	message := nl.DeserializeIfAddrmsg(data)
	if int(message.Index) != index || message.Family != unix.AF_INET && message.Family != unix.AF_INET6 {
		return p, false, nil
	}
	attrs, err := nl.ParseRouteAttr(data[message.Len():])
	if err != nil {
		return p, false, fmt.Errorf("address of interface number %d: %w", index, err)
	}
	var local, peer []byte // of IPv4 they are the same where there is no peer; of IPv6 there is no local one then
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.IFA_LOCAL:
			local = a.Value
		case unix.IFA_ADDRESS:
			peer = a.Value
		}
	}
	address, bits := peer, int(message.Prefixlen)
	if local != nil && !bytes.Equal(local, peer) {
		address, bits = local, 8*len(local)
	}
	ip, ok := netip.AddrFromSlice(address)
	return netip.PrefixFrom(ip, bits), ok, nil
}
