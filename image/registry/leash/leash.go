// Package leash holds the requests that a registry has berth send to other hosts, by a redirect or as its token
// server: they go no nearer to this machine than the registry itself is. Otherwise any registry could have the
// node ask what only the node may (its cloud's metadata, services on loopback), and read from the errors what came of it.
//
// # Contract
//
// What counts are the addresses that are connected to, each looked at when it is, not names. Private networks are as far as
// others: there is where the storage and the token servers of private registries are. How near the registry is tell the
// connections that DialHome makes; before the first it is far. Of several places the farthest counts. A host's
// redirect_to (hosts.Host) allows more. Through a proxy only an address that the URL spells out is looked at: what it
// connects to is the decision of whoever runs it. What is refused is a *TooNearError, and nothing was connected to.
package leash

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

	"berth/image/registry/hosts"
)

// nearness is how near to this machine an address is.
type nearness int32

const (
	unknownPlace nearness = iota
	far                   // other machines, those of private networks too
	onLink                // link-local (RFC 3927, RFC 4291): the wire, and what a cloud has put on it
	here                  // loopback, and the unspecified address, which leads there
	oracle                // a cloud's metadata: who reads it may have the node's credentials
)

func (n nearness) String() string {
	return [...]string{"of an unknown place", "of another machine", "link-local", "of this machine itself", "of a cloud's metadata service"}[n]
}

// metadata are the addresses that clouds serve their nodes' credentials at.
var metadata = []netip.Addr{
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

// nat64 is where IPv4 addresses are in IPv6 ones (RFC 6052).
var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// nearnessOf classifies an address.
func nearnessOf(a netip.Addr) nearness {
	a = a.Unmap().WithZone("")
	if nat64.Contains(a) {
		b := a.As16()
		a = netip.AddrFrom4([4]byte(b[12:]))
	}
	switch {
	case slices.Contains(metadata, a):
		return oracle
	case a.IsLoopback(), a.IsUnspecified():
		return here
	case a.IsLinkLocalUnicast():
		return onLink
	}
	return far
}

// Leash is that of one registry. Its methods may be called concurrently.
type Leash struct {
	host    string         // the registry's, without its port
	ports   []string       // the registry's
	allowed []netip.Prefix // redirect_to in hosts.toml
	home    atomic.Int32   // the farthest nearness at which the registry has been connected to
}

// New makes it for one host.
func New(h *hosts.Host) *Leash {
	l := &Leash{host: hostname(h.Host), allowed: h.RedirectTo, ports: []string{"443", "80"}}
	if port := hosts.Port(h.Host); port != "" {
		l.ports = []string{port}
	}
	return l
}

// TooNearError is the error of a request that leads too near.
type TooNearError struct {
	addr netip.Addr
	near nearness
}

func (e *TooNearError) Error() string {
	return fmt.Sprintf("the registry may not send requests to %s, which is an address %s; redirect_to in its hosts.toml would allow it", e.addr, e.near)
}

// check refuses an address that is nearer than the registry.
func (l *Leash) check(a netip.Addr) error {
	near := nearnessOf(a)
	if near == far || near != oracle && near <= nearness(l.home.Load()) {
		return nil
	}
	for _, p := range l.allowed {
		if p.Contains(a.Unmap().WithZone("")) {
			return nil
		}
	}
	return &TooNearError{a, near}
}

// note remembers where the registry is. Of several places the farthest counts: its owner may
// have its name lead anywhere for a moment.
func (l *Leash) note(a net.Addr) {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return
	}
	near := int32(nearnessOf(tcp.AddrPort().Addr()))
	for {
		home := l.home.Load()
		if home != int32(unknownPlace) && home <= near || l.home.CompareAndSwap(home, near) {
			return
		}
	}
}

// IsHome tells whether a host, with a port or without, has the registry's name.
func (l *Leash) IsHome(host string) bool { return hostname(host) == l.host }

// hostname returns a host without its port.
func hostname(host string) string { return strings.ToLower((&url.URL{Host: host}).Hostname()) }

// Dial is a DialContext of net/http's.
type Dial = func(ctx context.Context, network, address string) (net.Conn, error)

// DialHome connects for requests to the registry's name. A proxy's place says nothing of the registry's. Of ports that are not
// its own it is not known whose they are: its name may lead anywhere at another moment.
func (l *Leash) DialHome(dialer *net.Dialer) Dial {
	held := l.dialElsewhere(dialer)
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		isName := strings.EqualFold(host, l.host)
		if isName && !slices.Contains(l.ports, port) {
			return held(ctx, network, address)
		}
		conn, err := dialer.DialContext(ctx, network, address)
		if err == nil && isName {
			l.note(conn.RemoteAddr())
		}
		return conn, err
	}
}

// dialElsewhere connects for requests to other hosts. Each address is looked at when it is about to be connected to:
// what a name stands for may change at any time.
func (l *Leash) dialElsewhere(dialer *net.Dialer) Dial {
	held := *dialer
	held.Control = func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		return l.check(to.Addr())
	}
	return held.DialContext
}

// Elsewhere sends requests to hosts that are not the registry.
type Elsewhere struct {
	leash   *Leash
	direct  *http.Transport // without a proxy
	proxied *http.Transport // whoever runs the proxy decides what it connects to
}

// Elsewhere returns what sends the registry's requests to other hosts, through the environment's proxy where it has one for them.
// pool makes a connection pool that connects by a function.
func (l *Leash) Elsewhere(dialer *net.Dialer, pool func(Dial) *http.Transport) *Elsewhere {
	e := &Elsewhere{leash: l, direct: pool(l.dialElsewhere(dialer)), proxied: pool(dialer.DialContext)}
	e.direct.Proxy, e.proxied.Proxy = nil, http.ProxyFromEnvironment
	return e
}

// RoundTrip implements http.RoundTripper.
func (e *Elsewhere) RoundTrip(r *http.Request) (*http.Response, error) {
	proxy, err := http.ProxyFromEnvironment(r)
	if err != nil {
		return nil, errors.New("the proxy in the environment is not a valid URL") // which may hold a password
	}
	if proxy == nil {
		return e.direct.RoundTrip(r)
	}
	if a, err := netip.ParseAddr(r.URL.Hostname()); err == nil {
		if err := e.leash.check(a); err != nil {
			return nil, err
		}
	}
	return e.proxied.RoundTrip(r)
}

// CloseIdleConnections closes connections that are not in use.
func (e *Elsewhere) CloseIdleConnections() {
	e.direct.CloseIdleConnections()
	e.proxied.CloseIdleConnections()
}
