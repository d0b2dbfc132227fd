package registry

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"berth/internal/errdefs"
)

const (
	dialTimeout      = 30 * time.Second
	handshakeTimeout = 10 * time.Second
	idleTimeout      = 30 * time.Second
	maxRedirects     = 10
	maxHeaderBytes   = 256 << 10 // net/http's own limit is 10 MB
)

// connections are the connection pools of an endpoint. The host's TLS options apply to that host
// and to its token server. Other hosts have their own folders in certs.d.
type connections struct {
	guard  *redirectGuard
	dirs   []string // Sources.Dirs
	own    *http.Transport
	others *otherHosts // targets of redirects, verified, without client certificates
	tokens *otherHosts // the token server
	pool   func(*tls.Config) *otherHosts

	mu sync.Mutex // not held during requests
	// +checklocks:mu
	configured map[hostPurpose]*otherHosts // other hosts with folders
}

// hostPurpose is a host and what it is asked for.
type hostPurpose struct {
	host      string
	isForeign bool // for a URL of a manifest
}

// newConnections creates the connection pools for a host and for the other hosts that it names.
func newConnections(h *hostConfig, dirs []string, headerTimeout time.Duration) (*connections, error) {
	own, others, err := h.tlsConfigs()
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	if h.DialTimeout > 0 {
		dialer.Timeout = h.DialTimeout
	}
	tokens := own.Clone()
	if h.lenient { // no configuration allows that passwords go to unknown hosts
		tokens.InsecureSkipVerify = false
	}
	guard := newRedirectGuard(h.Host, h.RedirectTo)
	pool := func(config *tls.Config) *otherHosts {
		return guard.otherHosts(dialer, func(connect dialFunc) *http.Transport {
			return newTransport(connect, config.Clone(), headerTimeout)
		})
	}
	return &connections{
		guard: guard, dirs: dirs, own: newTransport(guard.dialRegistry(dialer), own, headerTimeout),
		others: pool(others), tokens: pool(tokens), pool: pool, configured: map[hostPurpose]*otherHosts{},
	}, nil
}

// newTransport creates a connection pool without HTTP/2. The layers of an image would share the
// congestion window of one connection, and the slowest could stop the others.
func newTransport(connect dialFunc, tlsConfig *tls.Config, headerTimeout time.Duration) *http.Transport {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	return &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            connect,
		TLSClientConfig:        tlsConfig,
		TLSHandshakeTimeout:    handshakeTimeout,
		ResponseHeaderTimeout:  headerTimeout,
		MaxResponseHeaderBytes: maxHeaderBytes,
		IdleConnTimeout:        idleTimeout,
		MaxIdleConnsPerHost:    16,
		DisableCompression:     true, // a blob is verified as it is stored
		Protocols:              &protocols,
	}
}

func (c *connections) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.guard.isRegistry(r.URL.Host) {
		return c.own.RoundTrip(r)
	}
	return c.roundTripTo(c.others, r, false)
}

// roundTripTo sends a request to another host. It uses the TLS options in the host's folder. If
// there is none, it uses the given connections.
func (c *connections) roundTripTo(usual *otherHosts, r *http.Request, isForeign bool) (*http.Response, error) {
	pool, err := c.configuredFor(hostPurpose{strings.ToLower(r.URL.Host), isForeign})
	if err != nil {
		return nil, err
	}
	if pool == nil {
		pool = usual
	}
	return pool.RoundTrip(r)
}

// configuredFor returns the connections to a host that has a folder with TLS options, or nil. The
// number of folders limits the number of pools.
func (c *connections) configuredFor(to hostPurpose) (*otherHosts, error) {
	c.mu.Lock()
	pool := c.configured[to]
	c.mu.Unlock()
	if pool != nil {
		return pool, nil
	}
	var config *tls.Config
	h, err := loadOther(c.dirs, to.host)
	if h == nil && err == nil {
		return nil, nil
	}
	if err == nil {
		config, _, err = h.tlsConfigs()
	}
	if err != nil {
		return nil, errdefs.FailedPrecondition("configuration of host %s: %w", errdefs.Clip(to.host), err)
	}
	if to.isForeign {
		config.Certificates = nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.configured[to] == nil {
		c.configured[to] = c.pool(config)
	}
	return c.configured[to], nil
}

// closeIdle closes connections that are not in use.
func (c *connections) closeIdle() {
	c.own.CloseIdleConnections()
	c.others.CloseIdleConnections()
	c.tokens.CloseIdleConnections()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pool := range c.configured {
		pool.CloseIdleConnections()
	}
}

// tokenConnections sends requests to a token server with the TLS options of the registry that names
// it, as containerd does. The registry decides who gets its users' passwords. The targets of its
// redirects are other hosts.
type tokenConnections struct {
	server   string // host of the realm
	wires    *connections
	registry http.RoundTripper // for all other hosts
}

func (t tokenConnections) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host != t.server {
		return t.registry.RoundTrip(r)
	}
	return t.wires.roundTripTo(t.wires.tokens, r, false)
}

// plainFallback uses https until a host answers in plain HTTP, and then uses http. It is for hosts
// on loopback and http hosts with TLS options.
type plainFallback struct {
	inner http.RoundTripper
	host  string
	plain atomic.Bool
}

func (f *plainFallback) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host != f.host {
		return f.inner.RoundTrip(r)
	}
	if !f.plain.Load() {
		resp, err := f.inner.RoundTrip(r)
		if !speaksPlain(err, f.host) {
			return resp, err
		}
		f.plain.Store(true)
	}
	r = r.Clone(r.Context())
	r.URL.Scheme = "http"
	return f.inner.RoundTrip(r)
}

// speaksPlain reports whether an https request failed in a way that suggests http.
func speaksPlain(err error, host string) bool {
	if err == nil {
		return false
	}
	var record tls.RecordHeaderError
	if errors.As(err, &record) && string(record.RecordHeader[:]) == "HTTP/" {
		return true
	}
	// net/http reports a plain HTTP response to a TLS handshake by text only.
	if strings.Contains(err.Error(), "server gave HTTP response to HTTPS client") ||
		strings.Contains(err.Error(), "TLS handshake timeout") {
		return true
	}
	var op *net.OpError // if the URL has no port, http uses another port, which may be open
	return portOf(host) == "" && errors.As(err, &op) && op.Op == "dial"
}

// originOnly adds configured headers and the Authorization to requests to one host. net/http would
// forward headers to the target of a redirect, and the Authorization to subdomains and other ports.
// A request after a redirect never has these headers.
type originOnly struct {
	inner   http.RoundTripper
	scheme  string
	host    string
	isPlain func() bool // the host speaks plain HTTP
	header  http.Header
	auth    *authorizer // nil: none
}

func (o *originOnly) RoundTrip(r *http.Request) (*http.Response, error) {
	if !o.owns(r.URL) {
		return o.inner.RoundTrip(r)
	}
	asked := r
	r = r.Clone(r.Context())
	for name, values := range o.header {
		r.Header[name] = values
	}
	if o.auth != nil {
		if header, _ := o.auth.current(); header != "" {
			r.Header.Set("Authorization", header.Reveal())
		}
	}
	resp, err := o.inner.RoundTrip(r)
	if resp != nil {
		resp.Request = asked
	}
	return resp, err
}

func (o *originOnly) owns(u *url.URL) bool {
	return u.Host == o.host && (u.Scheme == o.scheme || u.Scheme == "http" && o.isPlain())
}

// errRedirects is wrapped by the error of too many redirects.
var errRedirects = errors.New("redirects")

// checkRedirect limits redirects and removes the Referer: because the address of a blob may contain
// a token.
func checkRedirect(r *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return fmt.Errorf("more than %d %w: %s", maxRedirects, errRedirects, namesOf(via))
	}
	r.Header.Del("Referer")
	return nil
}

// namesOf names the first different URLs of a chain of redirects. Only the path that berth has
// requested is shown, because others may contain tokens.
func namesOf(via []*http.Request) string {
	const most = 3
	var names []string
	for _, r := range via {
		name := errdefs.Clip(r.URL.Scheme + "://" + r.URL.Host)
		if r.URL.Path == via[0].URL.Path {
			name += errdefs.Clip(r.URL.Path)
		} else {
			name += "/…"
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if len(names) > most {
		names = append(names[:most], "…")
	}
	return strings.Join(names, ", ")
}
