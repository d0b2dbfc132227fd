package registry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
)

// proximity is how close an address is to this machine.
type proximity int32

const (
	unknown   proximity = iota
	remote              // other machines, also in private networks
	linkLocal           // link-local (RFC 3927, RFC 4291); clouds serve node-local services there
	loopback            // loopback, and the unspecified address, which connects to loopback
	metadata            // a cloud's metadata service, which may hand out the node's credentials
)

func (p proximity) String() string {
	return [...]string{"unknown", "remote", "link-local", "loopback", "cloud metadata service"}[p]
}

// metadataAddrs are the addresses of the metadata services that serve credentials to cloud nodes.
var metadataAddrs = []netip.Addr{
	netip.MustParseAddr("169.254.169.254"), // nearly all
	netip.MustParseAddr("169.254.170.2"),   // Amazon ECS
	netip.MustParseAddr("169.254.170.23"),  // Amazon EKS
	netip.MustParseAddr("fd00:ec2::254"),   // Amazon
	netip.MustParseAddr("fd00:ec2::23"),    // Amazon EKS
	netip.MustParseAddr("fd20:ce::254"),    // Google
	netip.MustParseAddr("fe80::a9fe:a9fe"), // OpenStack
	netip.MustParseAddr("168.63.129.16"),   // Azure
	netip.MustParseAddr("100.100.100.200"), // Alibaba
	netip.MustParseAddr("192.0.0.192"),     // Oracle
}

// nat64 is the prefix that embeds IPv4 addresses in IPv6 addresses (RFC 6052).
var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// proximityOf classifies an address.
func proximityOf(a netip.Addr) proximity {
	a = a.Unmap().WithZone("")
	if nat64.Contains(a) {
		b := a.As16()
		a = netip.AddrFrom4([4]byte(b[12:]))
	}
	switch {
	case slices.Contains(metadataAddrs, a):
		return metadata
	case a.IsLoopback(), a.IsUnspecified():
		return loopback
	case a.IsLinkLocalUnicast():
		return linkLocal
	}
	return remote
}

// redirectGuard keeps a registry from directing berth's requests to this machine, to its link or to
// a cloud's metadata service. Otherwise any registry could use a redirect, or the address of a
// token server, to query services that only the node may reach. It could read the result from the
// error text.
//
// It checks the address of each connection, not the name, because a name may resolve differently at
// any time. It forbids addresses that are closer than the registry itself. Private networks count
// as remote, because the storage and the token servers of private registries use them. Before the
// first connection of dialRegistry the registry counts as remote. If it was reached at several
// addresses, the most remote address counts. Its methods may be called concurrently.
type redirectGuard struct {
	host     string         // the registry's host name, without port
	ports    []string       // the registry's ports
	allowed  []netip.Prefix // redirect_to in hosts.toml
	registry atomic.Int32   // proximity of the most remote address that served the registry
}

// newRedirectGuard returns the guard for the registry at host, which may have a port. Connections
// to the allowed networks always pass.
func newRedirectGuard(host string, allowed []netip.Prefix) *redirectGuard {
	g := &redirectGuard{host: hostname(host), allowed: allowed, ports: []string{"443", "80"}}
	if _, port, err := net.SplitHostPort(host); err == nil && port != "" {
		g.ports = []string{port}
	}
	return g
}

// forbiddenTargetError is the error of a connection that the guard forbids.
type forbiddenTargetError struct {
	addr      netip.Addr
	proximity proximity
}

func (e *forbiddenTargetError) Error() string {
	return fmt.Sprintf("the registry may not redirect to the %s address %s; redirect_to in its hosts.toml would allow it", e.proximity, e.addr)
}

// check returns an error if the address is closer than the registry.
func (g *redirectGuard) check(a netip.Addr) error {
	p := proximityOf(a)
	if p == remote || p != metadata && p <= proximity(g.registry.Load()) {
		return nil
	}
	for _, network := range g.allowed {
		if network.Contains(a.Unmap().WithZone("")) {
			return nil
		}
	}
	return &forbiddenTargetError{a, p}
}

// observe records the address of a connection to the registry. The most remote address counts,
// because the registry's owner could let its name resolve to this machine for a moment.
func (g *redirectGuard) observe(a net.Addr) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return
	}
	seen := int32(proximityOf(tcp.AddrPort().Addr()))
	for {
		old := g.registry.Load()
		if old != int32(unknown) && old <= seen || g.registry.CompareAndSwap(old, seen) {
			return
		}
	}
}

// isRegistry reports whether a host, with or without a port, has the registry's name.
func (g *redirectGuard) isRegistry(host string) bool { return hostname(host) == g.host }

// hostname returns a host without its port.
func hostname(host string) string { return strings.ToLower((&url.URL{Host: host}).Hostname()) }

// dialFunc has the type of http.Transport.DialContext.
type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// dialRegistry returns the function that connects for requests to the registry's name. Connections
// to the registry's own ports pass and are observed. Connections to the registry's name on other
// ports are checked like redirects, because the name may resolve to another machine at that moment.
// Connections to a proxy are not observed.
func (g *redirectGuard) dialRegistry(dialer *net.Dialer) dialFunc {
	guarded := g.dialOther(dialer)
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		isName := strings.EqualFold(host, g.host)
		if isName && !slices.Contains(g.ports, port) {
			return guarded(ctx, network, address)
		}
		conn, err := dialer.DialContext(ctx, network, address)
		if err == nil && isName {
			g.observe(conn.RemoteAddr())
		}
		return conn, err
	}
}

// dialOther returns the function that connects for requests to other hosts. It checks each address
// right before the connection, because a name may resolve differently at any time.
func (g *redirectGuard) dialOther(dialer *net.Dialer) dialFunc {
	guarded := *dialer
	guarded.Control = func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		return g.check(to.Addr())
	}
	return guarded.DialContext
}

// otherHosts is a transport for requests to hosts other than the registry.
type otherHosts struct {
	guard   *redirectGuard
	direct  *http.Transport // without a proxy, each connection checked
	proxied *http.Transport // through the proxy, whose operator decides where it connects
}

// otherHosts returns the transport for the registry's redirects and token servers. It uses the
// environment's proxy for hosts that have a proxy. newTransport returns a connection pool that
// dials with the given function.
func (g *redirectGuard) otherHosts(dialer *net.Dialer, newTransport func(dialFunc) *http.Transport) *otherHosts {
	o := &otherHosts{guard: g, direct: newTransport(g.dialOther(dialer)), proxied: newTransport(dialer.DialContext)}
	o.direct.Proxy, o.proxied.Proxy = nil, http.ProxyFromEnvironment
	return o
}

// RoundTrip implements http.RoundTripper.
func (o *otherHosts) RoundTrip(r *http.Request) (*http.Response, error) {
	proxy, err := http.ProxyFromEnvironment(r)
	if err != nil {
		return nil, errors.New("the proxy in the environment is not a valid URL") // not quoted: it may contain a password
	}
	if proxy == nil {
		return o.direct.RoundTrip(r)
	}
	if a, err := netip.ParseAddr(r.URL.Hostname()); err == nil {
		if err := o.guard.check(a); err != nil {
			return nil, err
		}
	}
	return o.proxied.RoundTrip(r)
}

// CloseIdleConnections closes the connections that are not in use.
func (o *otherHosts) CloseIdleConnections() {
	o.direct.CloseIdleConnections()
	o.proxied.CloseIdleConnections()
}
