package registry

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// authorizer authenticates requests to one host for one repository. Its methods may be called
// concurrently.
type authorizer struct {
	host    string // the endpoint's, for errors
	scope   string // requested if a challenge names no scope
	agent   string
	lookup  func(context.Context) (Credentials, error)
	tokens  func(server string) http.RoundTripper // for requests to a token server
	isPlain func() bool                           // the host is used without TLS, so its token server may be used without TLS, too

	mu sync.Mutex // not held during requests
	// +checklocks:mu
	header Secret // current value of the Authorization header, "" for none
	// +checklocks:mu
	generation int // counts changes of header
}

// current returns the Authorization header to send and its generation.
func (a *authorizer) current() (Secret, int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.header, a.generation
}

// preset sends a registry token without waiting for a challenge, because it needs no exchange.
func (a *authorizer) preset(token Secret) { a.set("Bearer " + token) }

func (a *authorizer) set(header Secret) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.header = header
	a.generation++
}

// answer handles the challenges of a 401 response to a request of the given generation. If it
// returns nil, the caller repeats the request.
func (a *authorizer) answer(ctx context.Context, challenges []challenge, generation int) error {
	if _, now := a.current(); now != generation {
		return nil // another request has renewed the token
	}
	cred, err := a.lookup(ctx)
	if err != nil {
		return err
	}
	if cred.RegistryToken != "" {
		return a.try("Bearer "+cred.RegistryToken, "the registry token is refused")
	}
	for _, scheme := range []string{"bearer", "basic"} {
		for _, c := range challenges {
			if c.Scheme != scheme {
				continue
			}
			if scheme == "bearer" {
				return a.answerBearer(ctx, c, cred)
			}
			return a.answerBasic(cred)
		}
	}
	return errdefs.New(codes.Unauthenticated, "the registry offers neither bearer nor basic authentication")
}

func (a *authorizer) answerBasic(cred Credentials) error {
	if !cred.hasPassword() {
		return errdefs.New(codes.Unauthenticated,
			"pull access denied: the registry requires a user name and password and none are configured")
	}
	pair := cred.Username + ":" + cred.Password.Reveal()
	header := Secret("Basic " + base64.StdEncoding.EncodeToString([]byte(pair)))
	return a.try(header, "user name or password is refused")
}

// try sets a header that does not expire. If it was sent already, the host has rejected it.
func (a *authorizer) try(header Secret, refused string) error {
	if old, _ := a.current(); old == header {
		return errdefs.New(codes.Unauthenticated, "%s", refused)
	}
	a.set(header)
	return nil
}

// answerBearer gets a token from the server that the challenge names. Like every client of the
// protocol it trusts the registry to choose that server, but it sends no credentials without TLS.
func (a *authorizer) answerBearer(ctx context.Context, c challenge, cred Credentials) error {
	realm, err := url.Parse(c.Params["realm"])
	if err != nil || realm.Host == "" {
		return errdefs.New(codes.Unauthenticated, "the registry's challenge names no valid token server")
	}
	if realm.Scheme != "https" && !(realm.Scheme == "http" && a.isPlain()) {
		return errdefs.New(codes.Unauthenticated, "token server %s without TLS is not used", errdefs.Clip(realm.Host))
	}
	scope := c.Params["scope"]
	if scope == "" {
		scope = a.scope
	}
	server := &tokenServer{realm: realm, agent: a.agent, service: c.Params["service"], scopes: strings.Fields(scope)}
	server.client = &http.Client{Transport: a.tokens(realm.Host), CheckRedirect: checkTokenRedirect(a.isPlain())}
	token, err := server.get(ctx, cred)
	if err != nil {
		return fmt.Errorf("token server %s: %w", errdefs.Clip(realm.Host), err)
	}
	a.set("Bearer " + token)
	return nil
}
