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

// Limits of retries of a list that changes while the kernel returns it. The pauses grow, because
// changes come in bursts. All pauses together take a fifth of a second.
const (
	dumpAttempts   = 10
	firstDumpPause = time.Millisecond
	lastDumpPause  = 50 * time.Millisecond
)

// dump requests a list until it is complete. The kernel returns a long list in pieces and marks it
// (NLM_F_DUMP_INTR) if the list changed between two pieces. The library then returns an incomplete
// list with ErrDumpInterrupted.
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

// addressesOf returns the IPv4 and IPv6 addresses of an interface with their prefix lengths. If the
// interface is missing, the error wraps ENODEV. Before Linux 4.20 the list is empty in this case.
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

// proxyDevice is the device of kube-proxy in IPVS mode. It has the address of each Service, so that
// the kernel delivers packets to these addresses to IPVS.
const proxyDevice = "kube-ipvs0"

// ServiceAddresses returns the node's addresses that belong to Services.
func ServiceAddresses() (all []netip.Addr, err error) {
	index, err := indexOf(proxyDevice)
	if index == 0 || err != nil {
		return nil, err
	}
	prefixes, err := addressesOf(index)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return nil, fmt.Errorf("list addresses of %s: %w", proxyDevice, err)
	}
	for _, p := range prefixes {
		all = append(all, p.Addr())
	}
	return all, nil
}

// askAddresses returns the kernel's messages about one interface's addresses. They fit into one
// piece, so changes cannot interrupt the list. Kernels before 4.20 return the addresses of all
// interfaces, which need many pieces on a node whose proxy has an address per service (kube-ipvs0).
func askAddresses(index int) ([][]byte, error) {
	// Subscribe without groups returns a private socket in the thread's namespace. The option below
	// needs a private socket.
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	// without this option the kernel ignores the index
	err = unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
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

// parseAddress decodes a message about an address. ok is false for another interface or family. The
// subnet of an address with a peer contains only this address.
func parseAddress(data []byte, index int) (p netip.Prefix, ok bool, err error) {
	message := nl.DeserializeIfAddrmsg(data)
	if int(message.Index) != index || message.Family != unix.AF_INET && message.Family != unix.AF_INET6 {
		return p, false, nil
	}
	attrs, err := nl.ParseRouteAttr(data[message.Len():])
	if err != nil {
		return p, false, fmt.Errorf("read address of interface %d: %w", index, err)
	}
	var local, peer []byte // if there is no peer, IPv4 has the same address in both attributes, and IPv6 has only IFA_ADDRESS
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
