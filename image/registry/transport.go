package registry

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"berth/image/registry/redirectguard"
)

const (
	dialTimeout      = 30 * time.Second
	handshakeTimeout = 10 * time.Second
	idleTimeout      = 30 * time.Second
	maxRedirects     = 10
	maxHeaderBytes   = 256 << 10 // net/http's own limit is 10 MB
	maxTokenBytes    = 1 << 20   // of a token server's answer
)

// connections are the connection pools of an endpoint: TLS options of a host are for that host alone.
type connections struct {
	guard  *redirectguard.Guard
	own    *http.Transport
	others *redirectguard.OtherHosts
}

// newConnections makes the connection pools for one host and those that it sends its clients on to.
func newConnections(h *hostConfig, headerTimeout time.Duration) (*connections, error) {
	own, others, err := h.tlsConfigs()
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	if h.DialTimeout > 0 {
		dialer.Timeout = h.DialTimeout
	}
	guard := redirectguard.New(h.Host, h.RedirectTo)
	otherTransport := func(connect redirectguard.Dial) *http.Transport {
		return newTransport(connect, others.Clone(), headerTimeout)
	}
	return &connections{guard: guard, own: newTransport(guard.DialRegistry(dialer), own, headerTimeout), others: guard.OtherHosts(dialer, otherTransport)}, nil
}

// newTransport makes a connection pool. HTTP/2 stays off: on one
// connection the layers of an image would share one congestion window, and the
// slowest could stop the others.
func newTransport(connect redirectguard.Dial, tlsConfig *tls.Config, headerTimeout time.Duration) *http.Transport {
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
		DisableCompression:     true, // a blob is verified in the form it is stored in
		Protocols:              &protocols,
	}
}

func (c *connections) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.guard.IsRegistry(r.URL.Host) {
		return c.own.RoundTrip(r)
	}
	return c.others.RoundTrip(r)
}

// closeIdle closes connections that are not in use.
func (c *connections) closeIdle() {
	c.own.CloseIdleConnections()
	c.others.CloseIdleConnections()
}

// plainFallback asks by https and, once a host has answered that in plain HTTP,
// by http. For hosts on loopback and http hosts with TLS options.
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
	// net/http reports a plain answer to its handshake by text only.
	if strings.Contains(err.Error(), "server gave HTTP response to HTTPS client") || strings.Contains(err.Error(), "TLS handshake timeout") {
		return true
	}
	var op *net.OpError // without a port, http is another port that may be open
	return portOf(host) == "" && errors.As(err, &op) && op.Op == "dial"
}

// originOnly adds what belongs to one host, and only to requests to that host:
// configured headers and the Authorization. net/http would forward headers that a
// request has to where it is redirected, Authorization even to subdomains and
// other ports; here the requests that it redirects never had them.
type originOnly struct {
	inner   http.RoundTripper
	scheme  string
	host    string
	isPlain func() bool // the host turned out to speak plain http
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

// shortBodies cuts answers off at a limit: the library that talks to token servers reads all of them.
type shortBodies struct {
	inner http.RoundTripper
	limit int64
}

func (s shortBodies) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := s.inner.RoundTrip(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.LimitReader(resp.Body, s.limit), resp.Body}
	}
	return resp, err
}

// errTokenRedirect is the error of noForwarding.
var errTokenRedirect = errors.New("it redirects the identity token to another host")

// noForwarding refuses to send a request's body on to another host. net/http does
// that for the status codes 307 and 308, and an identity token is sent in a body.
type noForwarding struct{ inner http.RoundTripper }

func (n noForwarding) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Response == nil || r.Body == nil || r.Body == http.NoBody { // not redirected, or nothing to protect
		return n.inner.RoundTrip(r)
	}
	if from := r.Response.Request.URL; from.Scheme != r.URL.Scheme || from.Host != r.URL.Host {
		_ = r.Body.Close() // a string's
		return nil, errTokenRedirect
	}
	return n.inner.RoundTrip(r)
}

// checkRedirect limits redirects and hides where they came from: the address of a
// blob may hold a token, and net/http would send it on as Referer.
func checkRedirect(r *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return fmt.Errorf("more than %d redirects", maxRedirects)
	}
	r.Header.Del("Referer")
	return nil
}
