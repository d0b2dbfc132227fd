package registry

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"path"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/fair"
)

// endpoint is one host of a registry, prepared for one repository. It can also be one URL of a
// blob.
type endpoint struct {
	caps     capability
	base     url.URL // API root and repository: https://host/v2/library/busybox; the URL of a blob
	foreign  bool    // the endpoint is the URL of a blob, see foreign.go; then origin and auth are nil
	ns       string  // the registry that this host mirrors; "" if it is the registry
	agent    string
	stall    time.Duration
	document time.Duration // documentTimeout
	client   *http.Client
	wires    *connections
	origin   *originOnly
	auth     *authorizer
	failure  atomic.Pointer[UnavailableError] // the last failure to reach the host, or a stall
}

// newEndpoint prepares host h for the repository of a source. given are the credentials of the
// pull. domain is the registry in the image's name. dirs are Sources.Dirs. stall is the longest
// wait for a byte.
func newEndpoint(h hostConfig, s source, c *Client, given Credentials, domain string, dirs []string,
	stall time.Duration) (*endpoint, error) {
	wires, err := newConnections(&h, dirs, stall)
	if err != nil {
		return nil, err
	}
	repository := h.repository(s.Repository)
	e := &endpoint{
		caps:     h.Caps,
		base:     url.URL{Scheme: h.Scheme, Host: h.Host, Path: path.Join("/", h.Path, s.Repository)},
		agent:    c.agent,
		stall:    stall,
		document: c.document,
		wires:    wires,
	}
	e.ns = s.proxy
	if canonicalHost(h.Host) != canonicalHost(s.Domain) {
		e.ns = s.Domain
	}
	var wire http.RoundTripper = wires
	isPlain := func() bool { return h.Scheme == "http" }
	if h.PlainNext {
		f := &plainFallback{inner: wires, host: h.Host}
		wire, isPlain = f, f.plain.Load
	}
	e.origin = &originOnly{inner: wire, scheme: h.Scheme, host: h.Host, header: h.Header, isPlain: isPlain}
	e.auth = &authorizer{
		host:    h.Host,
		scope:   "repository:" + repository + ":pull",
		agent:   c.agent,
		tokens:  e.tokenWires,
		isPlain: isPlain,
		lookup:  c.lookupFor(given, h, repository, domain),
	}
	if given.RegistryToken != "" && given.belongTo(h.Host, h.Home, domain) {
		e.auth.preset(given.RegistryToken)
	}
	e.origin.auth = e.auth
	e.client = &http.Client{Transport: e.origin, CheckRedirect: checkRedirect}
	return e, nil
}

// tokenWires returns the transport for requests to a token server. If the token server is the host
// itself, it adds the headers of hosts.toml. It never adds the registry's authorization.
func (e *endpoint) tokenWires(server string) http.RoundTripper {
	tokens := *e.origin
	tokens.auth = nil
	if !e.wires.guard.isRegistry(server) {
		tokens.inner = tokenConnections{server: server, wires: e.wires, registry: tokens.inner}
	}
	return &tokens
}

// String names the endpoint in errors.
func (e *endpoint) String() string {
	if !e.foreign && e.origin.isPlain() {
		return "http://" + e.base.Host
	}
	return e.base.Scheme + "://" + e.base.Host
}

// down returns why the host should be skipped, or nil. The host could not be reached, or has
// stalled.
func (e *endpoint) down() error {
	if u := e.failure.Load(); u != nil {
		return u
	}
	return nil
}

// noteDown records an error if it says that the host cannot be reached.
func (e *endpoint) noteDown(err error) {
	var u *UnavailableError
	if errors.As(err, &u) && !u.temporary {
		e.failure.Store(u)
	}
}

// maxAuthRounds limits the 401 responses to one request. The first may be due to missing
// authentication, and the second to a token that has expired or lacks the scope.
const maxAuthRounds = 3

// request sends a request below the repository ("manifests/latest") and authenticates as requested.
// It returns the response with any status. The caller closes the body.
func (e *endpoint) request(ctx context.Context, method, suffix string, header http.Header) (*http.Response, error) {
	if e.foreign {
		return e.send(ctx, method, e.base, header)
	}
	u := e.base
	u.Path += "/" + suffix
	if e.ns != "" {
		u.RawQuery = url.Values{"ns": {e.ns}}.Encode()
	}
	for round := 1; ; round++ {
		_, generation := e.auth.current()
		resp, err := e.send(ctx, method, u, header)
		if err != nil {
			return nil, err
		}
		if resp.StatusCode != http.StatusUnauthorized || !e.isOwn(resp) || round == maxAuthRounds {
			return resp, nil
		}
		challenges := parseChallenges(resp.Header)
		drain(resp.Body)
		if err := e.auth.answer(ctx, challenges, generation); err != nil {
			return nil, err
		}
	}
}

// send sends a request once. It cancels the transfer if no byte arrives for the stall timeout while
// the caller reads the body.
func (e *endpoint) send(ctx context.Context, method string, u url.URL, header http.Header) (*http.Response, error) {
	guarded, cancel := context.WithCancelCause(ctx)
	req, err := http.NewRequestWithContext(guarded, method, u.String(), nil)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	for name, values := range header {
		req.Header[name] = values
	}
	req.Header.Set("User-Agent", e.agent)
	resp, err := e.client.Do(req)
	if err != nil {
		cancel(nil)
		return nil, requestError(ctx, err)
	}
	body := fair.NewBody(guarded, cancel, resp.Body, fair.Meter{Window: e.stall, Rate: slowest})
	if resp.StatusCode >= http.StatusBadRequest {
		body.Hurry()
	}
	resp.Body = body
	return resp, nil
}

// isOwn reports whether a response came from this host and not from a redirect's target.
func (e *endpoint) isOwn(resp *http.Response) bool {
	return !e.foreign && e.origin.owns(resp.Request.URL)
}

// statusError converts an unsuccessful response to an error and closes it.
func (e *endpoint) statusError(resp *http.Response) error {
	err := statusError(resp, e.isOwn(resp))
	drain(resp.Body)
	if code := errdefs.Code(err); e.foreign && (code == codes.Unauthenticated || code == codes.PermissionDenied) {
		return errdefs.NotFound("not found without credentials: %s", errdefs.Clip(resp.Status))
	}
	return err
}

// drain reads a limited rest of the body, so that the connection can be used again, and closes the
// body. Its errors do not matter.
func drain(body io.ReadCloser) {
	_, _ = io.CopyN(io.Discard, body, 64<<10)
	_ = body.Close()
}

// slowest is the rate, in bytes a second, below which a transfer counts as stalled. Otherwise a
// registry could keep a pull alive with an occasional byte. The eight transfers of a pull together
// reach this rate on a line of half a megabit per second. Parts are fetched only at far higher
// rates, see fastEnough.
const slowest = 8 << 10
