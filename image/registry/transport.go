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
)

const (
	dialTimeout      = 30 * time.Second
	handshakeTimeout = 10 * time.Second
	idleTimeout      = 30 * time.Second
	maxRedirects     = 10
	maxHeaderBytes   = 256 << 10 // net/http's own limit is 10 MB
	maxTokenBytes    = 1 << 20   // of a token server's answer
)

// connections are the connection pools of an endpoint. The host's TLS options apply to that host
// only.
type connections struct {
	guard  *redirectGuard
	own    *http.Transport
	others *otherHosts
}

// newConnections creates the connection pools for a host and for the other hosts that it redirects
// to.
func newConnections(h *hostConfig, headerTimeout time.Duration) (*connections, error) {
	own, others, err := h.tlsConfigs()
	if err != nil {
		return nil, err
	}
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: 30 * time.Second}
	if h.DialTimeout > 0 {
		dialer.Timeout = h.DialTimeout
	}
	guard := newRedirectGuard(h.Host, h.RedirectTo)
	otherTransport := func(connect dialFunc) *http.Transport {
		return newTransport(connect, others.Clone(), headerTimeout)
	}
	return &connections{guard: guard, own: newTransport(guard.dialRegistry(dialer), own, headerTimeout),
		others: guard.otherHosts(dialer, otherTransport)}, nil
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
	return c.others.RoundTrip(r)
}

// closeIdle closes connections that are not in use.
func (c *connections) closeIdle() {
	c.own.CloseIdleConnections()
	c.others.CloseIdleConnections()
}

// plainFallback uses https until a host answers it in plain HTTP, then http. It is for hosts on
// loopback and http hosts with TLS options.
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
	var op *net.OpError // without a port, http uses another port, which may be open
	return portOf(host) == "" && errors.As(err, &op) && op.Op == "dial"
}

// originOnly adds configured headers and the Authorization to requests to one host. net/http would
// forward headers to the target of a redirect, and the Authorization to subdomains and other ports.
// Requests after a redirect never have them here.
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

// shortBodies truncates response bodies, because the library for token servers reads all of them.
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
var errTokenRedirect = errors.New("token server redirects the identity token to another host")

// noForwarding refuses to resend a request's body to another host. net/http does so for the status
// codes 307 and 308, and a body contains the identity token.
type noForwarding struct{ inner http.RoundTripper }

func (n noForwarding) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Response == nil || r.Body == nil || r.Body == http.NoBody { // no redirect, or no body to protect
		return n.inner.RoundTrip(r)
	}
	if from := r.Response.Request.URL; from.Scheme != r.URL.Scheme || from.Host != r.URL.Host {
		_ = r.Body.Close() // of a string
		return nil, errTokenRedirect
	}
	return n.inner.RoundTrip(r)
}

// checkRedirect limits redirects and removes the Referer: the address of a blob may contain a
// token.
func checkRedirect(r *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return fmt.Errorf("more than %d redirects", maxRedirects)
	}
	r.Header.Del("Referer")
	return nil
}
