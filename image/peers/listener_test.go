package peers

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"berth/image/peers/peerstest"
	"berth/internal/testutil"
)

// dialFrom makes the connections of a node come from an IP address.
func (n node) dialFrom(ip string) {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	n.client.Transport.(*http.Transport).DialContext = dialer.DialContext //nolint:forcetypeassert // newPeers
}

// strangers connect to a node. Nothing closes their connections but the node and end.
type strangers struct {
	t       *testing.T
	address string
	dialer  net.Dialer
	config  *tls.Config // with a certificate of another CA

	group sync.WaitGroup
	mu    sync.Mutex // guards conns
	conns []net.Conn
}

// newStrangers returns strangers at an IP address.
func newStrangers(t *testing.T, address, ip string) *strangers {
	t.Helper()
	cert, key := peerstest.NewCA(t).Node()
	pair, err := tls.LoadX509KeyPair(cert, key)
	testutil.Must(t, err)
	s := &strangers{t: t, address: address, dialer: net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}}
	s.config = &tls.Config{Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true, NextProtos: []string{"h2"}}
	t.Cleanup(s.end)
	return s
}

func (s *strangers) end() {
	s.mu.Lock()
	for _, c := range s.conns {
		_ = c.Close() // the node may have closed it
	}
	s.mu.Unlock()
	s.group.Wait()
}

// connect opens a connection that says nothing, or something wrong.
func (s *strangers) connect(i int) {
	conn, err := s.dialer.DialContext(s.t.Context(), "tcp", s.address)
	if err != nil {
		s.t.Error(err)
		return
	}
	s.mu.Lock()
	s.conns = append(s.conns, conn)
	s.mu.Unlock()
	switch i % 4 {
	case 0: // silent
	case 1: // no TLS
		_, _ = conn.Write([]byte("GET / HTTP/1.1\r\n\r\n")) // it may be closed
	case 2: // part of a handshake
		_, _ = conn.Write([]byte{22, 3, 1, 2, 0}) // it may be closed
	default: // a wrong certificate
		s.group.Go(func() {
			c := tls.Client(conn, s.config)
			if c.HandshakeContext(context.Background()) == nil { // the client's half of TLS 1.3
				if _, err := c.Read(make([]byte, 1)); err == nil {
					s.t.Error("a stranger is served")
				}
			}
		})
	}
}

// flood opens 200 connections a second until stop is closed. It returns their number.
func (s *strangers) flood(stop <-chan struct{}) (count int) {
	tick := time.NewTicker(time.Second / 200)
	defer tick.Stop()
	for ; ; count++ {
		select {
		case <-stop:
			return count
		case <-tick.C:
			s.connect(count)
		}
	}
}

// While 200 strangers a second connect, members fetch layers, each with a new connection. Strangers
// hold no place of a member, and a limited number of goroutines.
func TestStrangersDoNotDisturb(t *testing.T) { //nolint:paralleltest // it counts goroutines
	const least = 3 * maxHandshakes // connections of strangers
	nodes := newNodes(t, 3, func(_ int, cfg *Config) { cfg.MaxConnections = 4 })
	k, want := testKey("layer"), content(1<<20)
	nodes[0].put(k, want)
	before := runtime.NumGoroutine()
	s := newStrangers(t, nodes[0].cfg.Advertise, "127.0.1.1")
	stop, flooded := make(chan struct{}), make(chan int, 1)
	var flood sync.WaitGroup
	flood.Go(func() { flooded <- s.flood(stop) })
	seen := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.conns)
	}
	for i, n := range nodes[1:] {
		n.dialFrom(fmt.Sprintf("127.0.0.%d", i+3))
	}
	fetches := 0
	for ; seen() < least; fetches++ {
		n := nodes[1+fetches%2]
		n.client.CloseIdleConnections()
		testutil.Eventually(t, "the server notices it", func() bool { return nodes[0].listener.places.Taken() <= 1 })
		d, err := openAt(t, n, k, nodes[0].cfg.Advertise)
		if err != nil {
			t.Fatalf("fetch %d: %v", fetches, err)
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(d, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("fetch %d: %v", fetches, err)
		}
		testutil.Must(t, d.Close())
		if n, taken := nodes[0].listener.handshakes(), nodes[0].listener.places.Taken(); n > maxHandshakes || taken > len(nodes) {
			t.Fatalf("%d handshakes, %d places are taken by %d members", n, taken, len(nodes)-1)
		}
	}
	close(stop)
	flood.Wait()
	count := <-flooded
	testutil.Eventually(t, "the goroutines are limited", func() bool {
		return runtime.NumGoroutine() <= before+maxHandshakes+50
	})
	t.Logf("%d fetches beside %d strangers", fetches, count)
}

// A member whose address the others do not know gets in, too, while all handshakes are taken by
// silent strangers.
func TestSilentStrangersAreReplaced(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, func(_ int, cfg *Config) { cfg.MaxConnections = 1 })
	nodes[1].client.CloseIdleConnections()
	testutil.Eventually(t, "no place is taken", func() bool { return nodes[0].listener.places.Taken() == 0 })
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	s := newStrangers(t, nodes[0].cfg.Advertise, "127.0.1.1")
	for range maxHandshakes + 10 {
		s.connect(0)
	}
	l := nodes[0].listener
	testutil.Eventually(t, "all handshakes are taken", func() bool { return l.handshakes() == maxHandshakes })
	d, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise)
	if err != nil {
		t.Fatal(err)
	}
	testutil.Must(t, d.Close())
	if taken := l.places.Taken(); taken != 1 {
		t.Errorf("%d places are taken", taken)
	}
	testutil.Must(t, nodes[0].Close())
	if n := l.handshakes(); n > 0 {
		t.Errorf("%d handshakes are left after the end", n)
	}
}

// Which handshake another one replaces.
func TestHandshakesAreReplaced(t *testing.T) {
	t.Parallel()
	full := func(known func(i int) bool) (list []*handshake) {
		for i := range maxHandshakes {
			list = append(list, &handshake{known: known(i)})
		}
		return list
	}
	for name, c := range map[string]struct {
		pending []*handshake
		known   bool
		want    int // that is replaced; -1: none
		ok      bool
	}{
		"there is room":                  {nil, false, -1, true},
		"the oldest":                     {full(func(int) bool { return false }), false, 0, true},
		"the oldest stranger":            {full(func(i int) bool { return i < 7 }), false, 7, true},
		"the oldest stranger, by member": {full(func(i int) bool { return i < 7 }), true, 7, true},
		"no member by a stranger":        {full(func(int) bool { return true }), false, -1, false},
		"the oldest member by a member":  {full(func(int) bool { return true }), true, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := &memberListener{pending: append([]*handshake(nil), c.pending...)}
			h := &handshake{known: c.known}
			end, ok := m.enter(h)
			var want *handshake
			if c.want >= 0 {
				want = c.pending[c.want]
			}
			if end != want || ok != c.ok || m.handshakes() > maxHandshakes || m.leave(h) != c.ok {
				t.Errorf("replaced %p, %v; want %p, %v", end, ok, want, c.ok)
			}
			if end != nil && m.leave(end) {
				t.Error("the replaced one is still there")
			}
		})
	}
}

// Places are those of certificates. One beyond the limit is refused; a place comes back.
func TestConnectionsAreLimited(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 3, func(_ int, cfg *Config) { cfg.MaxConnections = 1 })
	for _, n := range nodes {
		n.client.CloseIdleConnections()
	}
	k := testKey("layer")
	nodes[0].put(k, content(64<<20)) // more than the buffers of a connection
	first, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openAt(t, nodes[2], k, nodes[0].cfg.Advertise); err == nil {
		t.Error("a second connection is served")
	}
	testutil.Must(t, first.Close())
	nodes[1].client.CloseIdleConnections()
	testutil.Eventually(t, "the place comes back", func() bool { return nodes[0].listener.places.Taken() == 0 })
	second, err := openAt(t, nodes[2], k, nodes[0].cfg.Advertise)
	if err != nil {
		t.Fatal(err)
	}
	testutil.Must(t, second.Close())
}

// failingListener cannot accept the first connections, for example for a lack of descriptors.
type failingListener struct {
	net.Listener
	failures int
}

func (f *failingListener) Accept() (net.Conn, error) {
	if f.failures--; f.failures >= 0 {
		return nil, errors.New("too many open files")
	}
	return f.Listener.Accept()
}

// The listener goes on after an error.
func TestAcceptIsRepeated(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	l := newMemberListener(&failingListener{tcp, 2}, nodes[0].server.TLSConfig, time.Minute, 1,
		func(net.Addr) bool { return false }, nodes[0].life, discard)
	var group sync.WaitGroup
	group.Go(l.run)
	conn, err := tls.Dial("tcp", tcp.Addr().String(), nodes[1].client.Transport.(*http.Transport).TLSClientConfig) //nolint:forcetypeassert // newPeers
	testutil.Must(t, err)
	defer conn.Close()
	got, err := l.Accept()
	testutil.Must(t, err)
	testutil.Must(t, got.Close())
	testutil.Must(t, l.Close())
	group.Wait()
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

// A panic in a handshake ends its connection only.
func TestPanicEndsHandshake(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	config, _, err := tlsConfigs(nodes[0].cfg)
	testutil.Must(t, err)
	own, calls := config.GetCertificate, atomic.Int64{}
	config.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if calls.Add(1) == 1 {
			panic("test")
		}
		return own(hello)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	l := newMemberListener(tcp, config, time.Minute, 1, func(net.Addr) bool { return false }, nodes[0].life, discard)
	var group sync.WaitGroup
	group.Go(l.run)
	client := nodes[1].client.Transport.(*http.Transport).TLSClientConfig //nolint:forcetypeassert // newPeers
	if _, err := tls.Dial("tcp", tcp.Addr().String(), client); err == nil {
		t.Error("the first handshake has succeeded")
	}
	conn, err := tls.Dial("tcp", tcp.Addr().String(), client)
	testutil.Must(t, err)
	defer conn.Close()
	got, err := l.Accept()
	testutil.Must(t, err)
	testutil.Must(t, got.Close())
	if n := l.handshakes(); n > 0 {
		t.Errorf("%d handshakes are left", n)
	}
	testutil.Must(t, l.Close())
	group.Wait()
}
