package verify

import (
	"fmt"
	"net"
	"path"
	"slices"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	sk_inet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	sk_netlink "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-netlink"
	sk_opts "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-opts"
	sk_unix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"github.com/moby/sys/capability"
	"golang.org/x/sys/unix"
)

// States of sockets (linux/tcp_states.h).
const (
	tcpEstablished = 1
	tcpClose       = 7
	tcpListen      = 10
)

// list adds a socket to the report.
func (c *check) list(format string, args ...any) {
	if len(c.Sockets) < maxListed {
		c.Sockets = append(c.Sockets, clip(fmt.Sprintf(format, args...)))
	}
}

// checkUnix checks a unix socket. Without the option ext-unix-sk, which berth does not use, CRIU
// connects it only to sockets of the images.
func (c *check) checkUnix(field string, s *sk_unix.UnixSkEntry) {
	c.checkOwner(field, s.GetFown())
	c.checkSocketNamespace(field, s.NsId)
	c.checkOptions(field, s.GetOpts())
	if flags := s.GetUflags(); flags != 0 {
		c.differ(field+": flags of a unix socket", fmt.Sprintf("%#x", flags), "0")
	}
	if s.GetNameDir() != "" {
		c.differ(field+": relative name of a unix socket", s.GetNameDir(), "none")
	}
	name := s.GetName()
	if len(name) > unix.SizeofSockaddrUnix-2 {
		c.differ(field+": name of a unix socket", fmt.Sprintf("%d bytes", len(name)), "108")
		return
	}
	if len(name) == 0 {
		return
	}
	if name[0] == 0 {
		c.list("unix @%s", name[1:])
		return
	}
	if name[len(name)-1] == 0 {
		name = name[:len(name)-1]
	}
	if p := string(name); !path.IsAbs(p) || path.Clean(p) != p {
		c.differ(field+": name of a unix socket", p, "a path in the container")
	}
	if id := s.GetMntId(); s.MntId != nil && id >= 0 && !c.mounts[id] {
		c.differ(field, fmt.Sprintf("%s on mount %d", name, id), "a mount of the spec")
	}
	c.list("unix %s", name)
}

// checkPeers checks that all peers of unix sockets are in the images.
func (c *check) checkPeers(files []*fdinfo.FileEntry) {
	have := map[uint32]bool{0: true}
	for _, f := range files {
		have[f.GetUsk().GetIno()] = true
	}
	for _, f := range files {
		if peer := f.GetUsk().GetPeer(); !have[peer] {
			field := fmt.Sprintf("file %d: peer of a unix socket", f.GetId())
			c.differ(field, "one outside the container", "one of the container")
		}
	}
}

// checkInet checks an IPv4 or IPv6 socket.
func (c *check) checkInet(field string, s *sk_inet.InetSkEntry) {
	c.checkOwner(field, s.GetFown())
	c.checkSocketNamespace(field, s.NsId)
	c.checkOptions(field, s.GetOpts())
	if f := s.GetFamily(); f != unix.AF_INET && f != unix.AF_INET6 {
		c.differ(field+": family of a socket", fmt.Sprint(f), "IPv4 or IPv6")
	}
	switch t := s.GetType(); {
	case t == unix.SOCK_STREAM && s.GetProto() == unix.IPPROTO_TCP, t == unix.SOCK_DGRAM:
	case t == unix.SOCK_RAW && c.e.may(capability.CAP_NET_RAW):
	default:
		c.differ(field+": type of a socket", fmt.Sprintf("%d, protocol %d", t, s.GetProto()), "TCP or UDP")
	}
	if port := s.GetSrcPort(); port != 0 && port < c.e.UnprivilegedPort && !c.e.may(capability.CAP_NET_BIND_SERVICE) {
		c.differ(field+": port of a socket", fmt.Sprint(port), fmt.Sprintf("%d or more", c.e.UnprivilegedPort))
	}
	protocol := "udp"
	if s.GetProto() == unix.IPPROTO_TCP {
		protocol = "tcp"
	}
	switch state := s.GetState(); state {
	case tcpListen:
		c.list("%s %s listening", protocol, address(s.GetSrcAddr(), s.GetSrcPort()))
	case tcpClose:
	case tcpEstablished: // berth dumps with tcp-close: it is closed after the restore
		c.list("%s %s to %s, closed by a restore", protocol,
			address(s.GetSrcAddr(), s.GetSrcPort()), address(s.GetDstAddr(), s.GetDstPort()))
	default:
		if protocol == "tcp" {
			c.list("tcp in state %d, closed by a restore", state)
		}
	}
}

// checkSocketNamespace checks that a socket is in the network namespace of the first process. CRIU
// could create it in another one, such as the node's.
func (c *check) checkSocketNamespace(field string, id *uint32) {
	if id != nil && *id != c.first.GetNetNsId() {
		c.differ(field+": network namespace of a socket", fmt.Sprint(*id), fmt.Sprint(c.first.GetNetNsId()))
	}
}

// address formats an address of the images: words in network byte order.
func address(words []uint32, port uint32) string {
	var ip net.IP
	for _, w := range words[:min(len(words), 4)] {
		ip = append(ip, byte(w), byte(w>>8), byte(w>>16), byte(w>>24))
	}
	return net.JoinHostPort(ip.String(), fmt.Sprint(port))
}

// checkNetlink checks a netlink socket. Other protocols change or observe more of the node.
func (c *check) checkNetlink(field string, s *sk_netlink.NetlinkSkEntry) {
	c.checkOwner(field, s.GetFown())
	c.checkSocketNamespace(field, s.NsId)
	c.checkOptions(field, s.GetOpts())
	allowed := []uint32{unix.NETLINK_ROUTE, unix.NETLINK_SOCK_DIAG, unix.NETLINK_KOBJECT_UEVENT, unix.NETLINK_GENERIC}
	if !slices.Contains(allowed, s.GetProtocol()) {
		c.differ(field+": protocol of a netlink socket", fmt.Sprint(s.GetProtocol()), "route, diag, uevent or generic")
	}
}

// maxSocketBuffer is twice what Linux 6.18 gives a TCP socket by itself (tcp_rmem).
const maxSocketBuffer = 64 << 20

// checkOptions checks the options that need a capability (socket(7)).
func (c *check) checkOptions(field string, o *sk_opts.SkOptsEntry) {
	if c.e.may(capability.CAP_NET_ADMIN) {
		return
	}
	const highest = 6 // priority without a capability
	if o.GetSoMark() != 0 && !c.e.may(capability.CAP_NET_RAW) {
		c.differ(field+": mark of a socket", fmt.Sprint(o.GetSoMark()), "0")
	}
	// CRIU sets them beyond the node's limits (SO_SNDBUFFORCE).
	for name, size := range map[string]uint32{"send": o.GetSoSndbuf(), "receive": o.GetSoRcvbuf()} {
		if size > maxSocketBuffer {
			c.differ(field+": "+name+" buffer of a socket", fmt.Sprint(size), fmt.Sprintf("at most %d bytes", maxSocketBuffer))
		}
	}
	if o.GetSoPriority() > highest {
		c.differ(field+": priority of a socket", fmt.Sprint(o.GetSoPriority()), fmt.Sprint(highest))
	}
}
