package registry

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// tokenTimeout limits a token exchange.
const tokenTimeout = 30 * time.Second

// authorizer authenticates requests to one host for one repository. Its methods may be called
// concurrently.
type authorizer struct {
	host    string // the endpoint's, for errors
	scope   string // requested if a challenge names none
	lookup  func(context.Context) (Credentials, error)
	tokens  http.RoundTripper // for requests to the token server
	isPlain func() bool       // the host is used without TLS; its token server may be, too

	mu         sync.Mutex // guards the fields below; not held during requests
	header     Secret     // current value of the Authorization header, "" for none
	generation int        // counts changes of header
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

// answer handles the challenges of a 401 response to a request of the given generation. After nil
// the caller repeats the request.
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
	token, err := a.exchange(ctx, c, cred, realm.Host)
	if err != nil {
		return fmt.Errorf("token server %s: %w", errdefs.Clip(realm.Host), err)
	}
	a.set("Bearer " + token)
	return nil
}

// exchange runs the token protocol of go-containerregistry: GET with basic authentication, or POST
// with an identity token.
func (a *authorizer) exchange(ctx context.Context, c challenge, cred Credentials, realmHost string) (Secret, error) {
	// Exchange rejects realms on private addresses other than the registry's. A cluster's token
	// server may have such an address. So Exchange gets the realm's host in place of the registry;
	// it has no other use for that name.
	server, err := name.NewRegistry(realmHost, name.WeakValidation)
	if err != nil {
		return "", errdefs.New(codes.Unauthenticated, "not a valid host name")
	}
	scope := c.Params["scope"]
	if scope == "" {
		scope = a.scope
	}
	limited, cancel := context.WithTimeout(ctx, tokenTimeout)
	defer cancel()
	offer := &transport.Challenge{Scheme: "bearer", Parameters: c.Params, Insecure: a.isPlain()}
	token, err := transport.Exchange(limited, server, cred.authenticator(), a.tokens, []string{scope}, offer)
	if err != nil {
		return "", tokenError(ctx, err)
	}
	if token.Token == "" {
		token.Token = token.AccessToken
	}
	if !Secret(token.Token).sendable() {
		return "", errdefs.New(codes.Unauthenticated, "token has characters that are invalid in a header")
	}
	return Secret(token.Token), nil
}

// tokenError returns the displayable part of a failed exchange. The library's text contains the
// server's answer, which may contain tokens.
func tokenError(ctx context.Context, err error) error {
	var status *transport.Error
	var bad *url.Error
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &status) && status.StatusCode >= 500, errors.As(err, &status) &&
		status.StatusCode == http.StatusTooManyRequests:
		return &UnavailableError{
			Err:       fmt.Errorf("%d %s", status.StatusCode, http.StatusText(status.StatusCode)),
			temporary: true,
		}
	case errors.As(err, &status) && status.StatusCode == http.StatusForbidden:
		return errdefs.New(codes.PermissionDenied, "pull access denied: 403 Forbidden")
	case errors.As(err, &status):
		return errdefs.New(codes.Unauthenticated,
			"pull access denied, repository does not exist or may require authorization: %d %s", status.StatusCode, http.StatusText(status.StatusCode))
	case errors.Is(err, errTokenRedirect):
		return errdefs.New(codes.Unauthenticated, "%w", errTokenRedirect)
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, context.DeadlineExceeded):
		return &UnavailableError{Err: fmt.Errorf("no complete answer within %v", tokenTimeout)}
	case errors.As(err, &bad) && isNetwork(bad.Err):
		return requestError(ctx, bad)
	case errors.As(err, &bad):
		return &UnavailableError{Err: errors.New("the request failed")}
	case errors.As(err, &syntax):
		return errdefs.New(codes.Unauthenticated, "response is not valid JSON")
	}
	return errdefs.New(codes.Unauthenticated, "response has no token")
}

// isNetwork reports whether an error is about the connection. Its text contains addresses and
// certificates, but nothing that a server sent.
func isNetwork(err error) bool {
	var n net.Error
	var cert *tls.CertificateVerificationError
	return errors.As(err, &n) || errors.As(err, &cert) || errors.Is(err, io.EOF) || errors.Is(err, context.Canceled)
}
