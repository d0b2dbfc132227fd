package registry

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
)

func TestProximityOf(t *testing.T) {
	t.Parallel()
	for addr, want := range map[string]proximity{
		"192.0.2.1": remote, "10.0.0.1": remote, "172.16.0.1": remote, "192.168.1.1": remote, "100.64.0.1": remote, "2001:db8::1": remote, "fd00::1": remote,
		"169.254.0.1": linkLocal, "fe80::1": linkLocal, "fe80::1%eth0": linkLocal, "::ffff:169.254.1.1": linkLocal, "64:ff9b::169.254.1.1": linkLocal,
		"127.0.0.1": loopback, "127.255.255.254": loopback, "::1": loopback, "0.0.0.0": loopback, "::": loopback, "::ffff:127.0.0.1": loopback,
		"64:ff9b::127.0.0.1": loopback, "169.254.169.254": metadata, "::ffff:169.254.169.254": metadata, "64:ff9b::a9fe:a9fe": metadata,
		"fd00:ec2::254": metadata, "fe80::a9fe:a9fe%2": metadata, "100.100.100.200": metadata, "168.63.129.16": metadata,
	} {
		t.Run(addr, func(t *testing.T) {
			if got := proximityOf(netip.MustParseAddr(addr)); got != want {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestRedirectGuardForbidsAddressesCloserThanRegistry(t *testing.T) {
	t.Parallel()
	addresses := map[proximity]string{remote: "192.0.2.1", linkLocal: "169.254.0.1", loopback: "127.0.0.1", metadata: "169.254.169.254"}
	for registry, closest := range map[proximity]proximity{unknown: remote, remote: remote, linkLocal: linkLocal, loopback: loopback, metadata: loopback} {
		g := &redirectGuard{}
		g.registry.Store(int32(registry))
		for p, a := range addresses {
			t.Run(fmt.Sprintf("registry %v, target %v", registry, p), func(t *testing.T) {
				if err := g.check(netip.MustParseAddr(a)); (err == nil) != (p <= closest) {
					t.Errorf("got %v", err)
				}
			})
		}
	}
}

func TestRedirectGuardAllowsConfiguredNetworks(t *testing.T) {
	t.Parallel()
	g := newRedirectGuard("registry.example.com", networks("169.254.169.254/32", "127.0.0.0/8", "fe80::/10"))
	for addr, want := range map[string]bool{"169.254.169.254": true, "::ffff:127.0.0.9": true, "fe80::1%lo": true, "::1": false, "169.254.1.1": false} {
		t.Run(addr, func(t *testing.T) {
			if err := g.check(netip.MustParseAddr(addr)); (err == nil) != want {
				t.Errorf("got %v", err)
			}
		})
	}
}

func networks(prefixes ...string) []netip.Prefix {
	var list []netip.Prefix
	for _, p := range prefixes {
		list = append(list, netip.MustParsePrefix(p))
	}
	return list
}

func TestRedirectGuardKeepsMostRemoteAddress(t *testing.T) {
	t.Parallel()
	g := &redirectGuard{}
	for _, step := range []struct {
		addr string
		want proximity
	}{{"127.0.0.1", loopback}, {"169.254.1.1", linkLocal}, {"127.0.0.1", linkLocal}, {"192.0.2.1", remote}, {"127.0.0.1", remote}} {
		g.observe(&net.TCPAddr{IP: net.ParseIP(step.addr), Port: 443})
		if got := proximity(g.registry.Load()); got != step.want {
			t.Errorf("after %s: %v, want %v", step.addr, got, step.want)
		}
	}
}

// remoteRegistry returns the guard of a registry that was reached at a remote address.
func remoteRegistry(host string, allowed ...netip.Prefix) *redirectGuard {
	g := newRedirectGuard(host, allowed)
	g.registry.Store(int32(remote))
	return g
}

// getThrough sends a request through the guard's transport for other hosts.
func getThrough(t *testing.T, g *redirectGuard, url string) error {
	t.Helper()
	o := g.otherHosts(new(net.Dialer), func(dial dialFunc) *http.Transport { return &http.Transport{DialContext: dial} })
	defer o.CloseIdleConnections()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := o.RoundTrip(r)
	if err == nil {
		resp.Body.Close()
	}
	return err
}

// countingServer starts a server on 127.0.0.1 that counts its requests, and returns its port.
func countingServer(t *testing.T) (port string, requests *atomic.Int64) {
	t.Helper()
	requests = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { requests.Add(1) }))
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port, requests
}

func TestRedirectGuardChecksResolvedAddresses(t *testing.T) {
	t.Parallel()
	port, requests := countingServer(t)
	for _, host := range []string{"127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1.2.3"} {
		t.Run(host, func(t *testing.T) {
			requests.Store(0)
			var forbidden *forbiddenTargetError
			if err := getThrough(t, remoteRegistry("registry.example.com"), "http://"+host+":"+port); !errors.As(err, &forbidden) || requests.Load() > 0 {
				t.Errorf("forbidden: %v, %d requests", err, requests.Load())
			}
			if host == "127.1.2.3" { // the server listens on 127.0.0.1 only
				return
			}
			allowed := networks("127.0.0.0/8", "0.0.0.0/32", "::1/128")
			if err := getThrough(t, remoteRegistry("registry.example.com", allowed...), "http://"+host+":"+port); err != nil || requests.Load() != 1 {
				t.Errorf("allowed: %v, %d requests", err, requests.Load())
			}
		})
	}
}

func TestRedirectGuardChecksForeignPorts(t *testing.T) {
	t.Parallel()
	port, _ := countingServer(t)
	for name, c := range map[string]struct {
		host    string
		allowed bool
	}{"own port": {"LocalHost:" + port, true}, "other port": {"localhost:1", false}} {
		t.Run(name, func(t *testing.T) {
			conn, err := remoteRegistry(c.host).dialRegistry(new(net.Dialer))(t.Context(), "tcp", "localhost:"+port)
			var forbidden *forbiddenTargetError
			if c.allowed != (err == nil) || !c.allowed && !errors.As(err, &forbidden) {
				t.Errorf("got %v", err)
			}
			if err == nil {
				conn.Close()
			}
		})
	}
}

func TestRedirectGuardUsesDefaultPorts(t *testing.T) {
	t.Parallel()
	if g := newRedirectGuard("registry.example.com", nil); !slices.Equal(g.ports, []string{"443", "80"}) || g.host != "registry.example.com" {
		t.Errorf("got host %q, ports %v", g.host, g.ports)
	}
}
