package leash

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"

	"berth/image/registry/hosts"
)

func TestNearness(t *testing.T) {
	for addr, want := range map[string]nearness{
		"192.0.2.1": far, "10.0.0.1": far, "172.16.0.1": far, "192.168.1.1": far, "100.64.0.1": far, "2001:db8::1": far, "fd00::1": far,
		"169.254.0.1": onLink, "fe80::1": onLink, "fe80::1%eth0": onLink, "::ffff:169.254.1.1": onLink, "64:ff9b::169.254.1.1": onLink,
		"127.0.0.1": here, "127.255.255.254": here, "::1": here, "0.0.0.0": here, "::": here, "::ffff:127.0.0.1": here, "64:ff9b::127.0.0.1": here,
		"169.254.169.254": oracle, "::ffff:169.254.169.254": oracle, "64:ff9b::a9fe:a9fe": oracle, "fd00:ec2::254": oracle, "fe80::a9fe:a9fe%2": oracle,
		"100.100.100.200": oracle, "168.63.129.16": oracle,
	} {
		if got := nearnessOf(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s is %v, want %v", addr, got, want)
		}
	}
}

// Nothing is nearer than the registry but what its hosts.toml allows.
func TestLeash(t *testing.T) {
	addresses := map[nearness]string{far: "192.0.2.1", onLink: "169.254.0.1", here: "127.0.0.1", oracle: "169.254.169.254"}
	for home, nearest := range map[nearness]nearness{unknownPlace: far, far: far, onLink: onLink, here: here, oracle: here} {
		l := &Leash{}
		l.home.Store(int32(home))
		for near, a := range addresses {
			if err := l.check(netip.MustParseAddr(a)); (err == nil) != (near <= nearest) {
				t.Errorf("registry %v, address %v: %v", home, near, err)
			}
		}
	}
	l := &Leash{allowed: []netip.Prefix{netip.MustParsePrefix("169.254.169.254/32"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("fe80::/10")}}
	for addr, want := range map[string]bool{"169.254.169.254": true, "::ffff:127.0.0.9": true, "fe80::1%lo": true, "::1": false, "169.254.1.1": false} {
		if err := l.check(netip.MustParseAddr(addr)); (err == nil) != want {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

// A registry whose name leads here only for a moment is not here.
func TestLeashNotesTheFarthestPlace(t *testing.T) {
	l := &Leash{}
	for _, step := range []struct {
		addr string
		want nearness
	}{{"127.0.0.1", here}, {"169.254.1.1", onLink}, {"127.0.0.1", onLink}, {"192.0.2.1", far}, {"127.0.0.1", far}} {
		l.note(&net.TCPAddr{IP: net.ParseIP(step.addr), Port: 443})
		if got := nearness(l.home.Load()); got != step.want {
			t.Errorf("after %s: %v, want %v", step.addr, got, step.want)
		}
	}
}

// elsewhereOf is the way to other hosts of a registry that is far.
func elsewhereOf(t *testing.T, allowed ...netip.Prefix) *Elsewhere {
	t.Helper()
	l := New(&hosts.Host{Host: "registry.example.com", RedirectTo: allowed})
	l.home.Store(int32(far))
	e := l.Elsewhere(new(net.Dialer), func(connect Dial) *http.Transport { return &http.Transport{DialContext: connect} })
	t.Cleanup(e.CloseIdleConnections)
	return e
}

// It is addresses that count: names are looked up, and looked at when they are connected to.
func TestNamesThatLeadNear(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer server.Close()
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1.2.3"} {
		get := func(e *Elsewhere) error {
			r, err := http.NewRequest(http.MethodGet, "http://"+host+":"+port, nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := e.RoundTrip(r)
			if err == nil {
				resp.Body.Close()
			}
			return err
		}
		var near *TooNearError
		if err := get(elsewhereOf(t)); !errors.As(err, &near) || asked.Load() > 0 {
			t.Errorf("%s: %v, %d requests", host, err, asked.Load())
		}
		err := get(elsewhereOf(t, netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("::1/128")))
		if host != "127.1.2.3" && (err != nil || asked.Load() != 1) { // httptest listens at one address
			t.Errorf("%s, allowed: %v, %d requests", host, err, asked.Load())
		}
		asked.Store(0)
	}
}

// The registry's own name may lead here by its own ports only.
func TestOwnNameThatLeadsNear(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for own, h := range map[bool]string{true: "LocalHost:" + port, false: "localhost:1"} {
		l := New(&hosts.Host{Host: h})
		l.home.Store(int32(far))
		conn, err := l.DialHome(new(net.Dialer))(t.Context(), "tcp", "localhost:"+port)
		var near *TooNearError
		if own != (err == nil) || !own && !errors.As(err, &near) {
			t.Errorf("registry %s: %v", h, err)
		}
		if err == nil {
			conn.Close()
		}
	}
	if l := New(&hosts.Host{Host: "registry.example.com"}); !slices.Equal(l.ports, []string{"443", "80"}) || l.host != "registry.example.com" {
		t.Errorf("%+v", l)
	}
}
