package peers

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"berth/internal/cleanup"
	"berth/internal/fair"
	"berth/internal/task"
)

const (
	// homeCount is the number of home nodes of a layer. The second node serves while the first is
	// down.
	homeCount = 2
	// announcePeriod is the time between two announcements of all layers to their home nodes.
	announcePeriod = time.Hour
	// maxBody limits the JSON of a call: the keys of an announcement.
	maxBody = 1 << 20
	// maxAnnounced limits the keys in one announcement. So many keys fit into maxBody.
	maxAnnounced = 1000
	// closeTimeout limits the wait for requests that read a disk when berth stops.
	closeTimeout = 5 * time.Second
	// idleTime is how long an unused connection is kept for the next layer of a pull.
	idleTime = 10 * time.Second
	// pauseOfRounds is the least time between two requests of a Search to the same peers.
	pauseOfRounds = 500 * time.Millisecond
	// DefaultSearchTimeout is the default of Config.SearchTimeout.
	DefaultSearchTimeout = time.Minute
	// DefaultUploads is the default of Config.MaxUploads.
	DefaultUploads = 8
	// DefaultWaiting is the default of Config.MaxWaiting. A request that waits takes about 20 KB.
	DefaultWaiting = 2048
	// DefaultConnections is the default of Config.MaxConnections. A connection takes about 50 KB.
	DefaultConnections = 1024
	// DefaultCallTimeout is the default of Config.CallTimeout.
	DefaultCallTimeout = 5 * time.Second
)

// Tar is the exact tar of a stored layer.
type Tar interface {
	io.ReaderAt
	io.Closer
	Size() int64
}

// Layers are the layers that this node has. Its methods may be called concurrently.
type Layers interface {
	// OpenShared opens the tar of a layer that an image of the registry uses. The error is NotFound
	// if there is none. The layer stays until the Tar is closed.
	OpenShared(ctx context.Context, k Key) (Tar, error)
	// HasShared reports whether OpenShared would open a layer. It is fast.
	HasShared(k Key) bool
	// SharedLayers returns the keys of all layers that OpenShared opens.
	SharedLayers() []Key
}

// Observer receives measurements. Its methods must not block.
type Observer interface {
	// PeerReceived reports bytes that this node has received from peers.
	PeerReceived(bytes int)
	// PeerSent reports bytes that this node has sent to peers.
	PeerSent(bytes int)
}

// Config configures Peers.
type Config struct {
	Listen    string   // address of the server
	Advertise string   // IP address and port of this node for other nodes, as their seeds resolve it
	Seeds     []string // HOST:PORT of other nodes; a name may have the addresses of all nodes
	// PEM files: certificate and key of this node, and the CA whose certificates all peers have.
	Cert, Key, CA  string
	MaxUploads     int           // concurrent; 0: DefaultUploads
	MaxWaiting     int           // requests that wait at the same time; 0: DefaultWaiting
	MaxConnections int           // of peers to the server; 0: DefaultConnections
	Bandwidth      int64         // bytes a second of all uploads; 0: no limit
	Stall          time.Duration // longest wait for a byte of a transfer, window of its rate
	CallTimeout    time.Duration // limit of a connection and of a call; 0: DefaultCallTimeout
	SearchTimeout  time.Duration // longest wait of a Search without progress; 0: DefaultSearchTimeout
	Layers         Layers
	Observer       Observer // nil: none
	Waits          *task.Waits
	Log            *slog.Logger
}

// Peers is this node's part of the exchange. Its methods may be called concurrently.
type Peers struct {
	cfg      Config
	members  *members
	tracker  *tracker
	server   *http.Server
	listener *memberListener
	address  net.Addr
	client   *http.Client
	uploads  *fair.Slots // by certificate
	waiting  *fair.Slots // of requests that wait, by certificate
	pace     *rate.Limiter
	life     *task.Lifetime
	wait     time.Duration // longestWait, except in tests
	pause    time.Duration // pauseOfRounds, except in tests

	mu sync.Mutex
	// +checklocks:mu
	fetching map[Key]*fetch
}

// fetch is a layer that this node fetches from its registry.
type fetch struct {
	received []func() int64 // of each pull that fetches it
	running  int            // pulls that have not ended
	done     chan struct{}  // closed at the first success or the last failure
}

// Open starts the server. The caller closes the result. It must not close Layers before.
func Open(cfg Config) (_ *Peers, err error) {
	if cfg.Advertise, err = normalAddress(cfg.Advertise); err != nil {
		return nil, fmt.Errorf("peers: advertised address: %w", err)
	}
	serverTLS, clientTLS, err := tlsConfigs(cfg)
	if err != nil {
		return nil, fmt.Errorf("peers: %w", err)
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	listener, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("peers: %w", err)
	}
	p := newPeers(cfg, clientTLS)
	p.address = listener.Addr()
	p.server = p.newServer(serverTLS)
	p.listener = newMemberListener(listener, serverTLS, p.cfg.CallTimeout, p.cfg.MaxConnections, p.members.hasHost, p.life,
		cfg.Log)
	p.spawn("accept", func(context.Context) { p.listener.run() })
	p.spawn("serve", func(context.Context) {
		if err := p.server.Serve(p.listener); !errors.Is(err, http.ErrServerClosed) {
			cfg.Log.Error("the server for peers has ended", "error", err)
		}
	})
	p.spawn("resolve seeds", p.members.run)
	p.spawn("announce layers", p.announceAll)
	undo.Release()
	return p, nil
}

// Check returns an error if Open would fail because of the files or addresses of a configuration.
// It changes nothing.
func Check(cfg Config) error {
	_, addressErr := normalAddress(cfg.Advertise)
	_, _, filesErr := tlsConfigs(cfg)
	if err := errors.Join(addressErr, filesErr); err != nil {
		return fmt.Errorf("peers: %w", err)
	}
	return nil
}

// normalAddress returns the form of an IP address and port in which members are compared.
func normalAddress(text string) (string, error) {
	address, err := netip.ParseAddrPort(text)
	if err != nil {
		return "", err
	}
	return netip.AddrPortFrom(address.Addr().Unmap(), address.Port()).String(), nil
}

func newPeers(cfg Config, clientTLS *tls.Config) *Peers {
	cfg.MaxUploads = cmp.Or(cfg.MaxUploads, DefaultUploads)
	cfg.MaxWaiting = cmp.Or(cfg.MaxWaiting, DefaultWaiting)
	cfg.MaxConnections = cmp.Or(cfg.MaxConnections, DefaultConnections)
	cfg.CallTimeout = cmp.Or(cfg.CallTimeout, DefaultCallTimeout)
	cfg.SearchTimeout = cmp.Or(cfg.SearchTimeout, DefaultSearchTimeout)
	if cfg.Observer == nil {
		cfg.Observer = noObserver{}
	}
	p := &Peers{
		cfg:      cfg,
		members:  newMembers(cfg.Advertise, cfg.Seeds, cfg.Log),
		tracker:  newTracker(time.Now),
		uploads:  fair.NewSlots(cfg.MaxUploads),
		waiting:  fair.NewSlots(cfg.MaxWaiting),
		pace:     rate.NewLimiter(rate.Inf, burst),
		life:     task.NewLifetime(),
		wait:     longestWait,
		pause:    pauseOfRounds,
		fetching: map[Key]*fetch{},
	}
	if cfg.Bandwidth > 0 {
		p.pace.SetLimit(rate.Limit(cfg.Bandwidth))
	}
	p.client = &http.Client{
		Transport: &http.Transport{
			Proxy:           nil, // no proxy, because it would see the layers, and peers are near
			DialContext:     (&net.Dialer{Timeout: cfg.CallTimeout}).DialContext,
			TLSClientConfig: clientTLS, ForceAttemptHTTP2: true,
			TLSHandshakeTimeout: cfg.CallTimeout, IdleConnTimeout: idleTime,
			MaxConnsPerHost:        1, // otherwise concurrent requests would each dial
			MaxResponseHeaderBytes: 16 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return errors.New("a peer must not redirect") },
	}
	return p
}

// noObserver ignores all measurements.
type noObserver struct{}

func (noObserver) PeerReceived(int) {}
func (noObserver) PeerSent(int)     {}

// Address returns the address of the server.
func (p *Peers) Address() net.Addr { return p.address }

// Close stops the server, ends all requests, and waits for them and for all goroutines.
func (p *Peers) Close() error {
	p.life.Cancel()
	p.life.Close()
	err := p.server.Close()
	p.client.CloseIdleConnections()
	return errors.Join(err, p.life.WaitFor(closeTimeout))
}

// spawn starts a goroutine that ends with Close.
func (p *Peers) spawn(what string, f func(ctx context.Context)) {
	p.life.Spawn(func() { p.guard(what, func() { f(p.life.Context()) }) })
}

// guard logs a panic of f.
func (p *Peers) guard(what string, f func()) {
	_ = task.Guard(p.cfg.Log, what, "peers", func() error { f(); return nil }) // Guard has logged the error
}

// tlsConfigs reads the files of cfg. Both sides verify that the other side has a certificate of the
// CA. The name in it does not matter: nodes have many addresses, and all peers have the same
// rights.
func tlsConfigs(cfg Config) (server, client *tls.Config, err error) {
	own := &keyPair{files: [2]string{cfg.Cert, cfg.Key}} // renewed while berth runs
	if _, err := own.get(); err != nil {
		return nil, nil, err
	}
	pem, err := os.ReadFile(cfg.CA)
	if err != nil {
		return nil, nil, fmt.Errorf("certificates of the CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, nil, fmt.Errorf("certificates of the CA: %s has none", cfg.CA)
	}
	server = &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return own.get() },
		ClientAuth:     tls.RequireAndVerifyClientCert, ClientCAs: pool,
		NextProtos: []string{"h2", "http/1.1"},
	}
	client = &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return own.get() },
		InsecureSkipVerify:   true, //nolint:gosec // VerifyConnection verifies the chain, but not the name
		VerifyConnection:     func(state tls.ConnectionState) error { return verifyChain(state, pool) },
	}
	return server, client, nil
}

// verifyChain verifies that a server's certificate is one of the CA's.
func verifyChain(state tls.ConnectionState, pool *x509.CertPool) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("the peer has no certificate")
	}
	intermediates := x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	_, err := state.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots: pool, Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	return err
}
