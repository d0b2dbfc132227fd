package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

const (
	tokenTimeout  = 30 * time.Second // of a token exchange
	maxTokenBytes = 256 << 10        // of a token server's answer
)

// tokenServer is the server that a challenge names. It has the protocol of the distribution
// project: GET with a password, POST with an identity token.
type tokenServer struct {
	realm   *url.URL
	client  *http.Client
	agent   string
	service string
	scopes  []string
}

// get returns a token for the credentials.
func (s *tokenServer) get(ctx context.Context, cred Credentials) (Secret, error) {
	limited, cancel := context.WithTimeout(ctx, tokenTimeout)
	defer cancel()
	token, err := s.exchange(limited, cred)
	switch {
	case err == nil:
		return token, nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	case limited.Err() != nil:
		return "", &UnavailableError{Err: fmt.Errorf("no complete answer within %v", tokenTimeout)}
	}
	return "", err
}

func (s *tokenServer) exchange(ctx context.Context, cred Credentials) (Secret, error) {
	resp, err := s.request(ctx, cred)
	if err != nil {
		return "", tokenError(ctx, err)
	}
	defer resp.Body.Close() // read to its end or abandoned
	if resp.StatusCode != http.StatusOK {
		return "", tokenStatus(resp)
	}
	return readToken(ctx, resp)
}

// request requests a token. Not all servers accept identity tokens.
func (s *tokenServer) request(ctx context.Context, cred Credentials) (*http.Response, error) {
	if cred.IdentityToken != "" {
		resp, err := s.post(ctx, cred.IdentityToken)
		if err != nil || resp.StatusCode != http.StatusNotFound && resp.StatusCode != http.StatusMethodNotAllowed {
			return resp, err
		}
		drain(resp.Body)
	}
	return s.ask(ctx, cred)
}

// ask requests a token with a password or without credentials.
func (s *tokenServer) ask(ctx context.Context, cred Credentials) (*http.Response, error) {
	u := *s.realm
	query := u.Query()
	query["scope"] = s.scopes
	if s.service != "" {
		query.Set("service", s.service)
	}
	u.RawQuery = query.Encode()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	if cred.hasPassword() {
		r.SetBasicAuth(cred.Username, cred.Password.Reveal())
	}
	return s.do(r)
}

// post requests a token with an identity token.
func (s *tokenServer) post(ctx context.Context, identity Secret) (*http.Response, error) {
	form := url.Values{
		"grant_type": {"refresh_token"}, "refresh_token": {identity.Reveal()},
		"client_id": {s.agent}, "scope": {strings.Join(s.scopes, " ")},
	}
	if s.service != "" {
		form.Set("service", s.service)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.realm.String(), strings.NewReader(form.Encode()))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return s.do(r)
}

func (s *tokenServer) do(r *http.Request) (*http.Response, error) {
	r.Header.Set("User-Agent", s.agent)
	return s.client.Do(r)
}

// readToken reads the answer of a token server. Its other fields are not used, because a token
// counts until the registry refuses it.
func readToken(ctx context.Context, resp *http.Response) (Secret, error) {
	data, err := readLimited(resp.Body, maxTokenBytes)
	if err != nil {
		return "", tokenError(ctx, err)
	}
	data, err = unpackJSON(data, resp.Header.Get("Content-Encoding"), maxTokenBytes)
	var answer struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"`
	}
	if err == nil {
		err = decode(data, &answer)
	}
	if err != nil {
		return "", errdefs.New(codes.Unauthenticated, "its response has no token: %w", err)
	}
	token := Secret(answer.Token)
	if token == "" {
		token = Secret(answer.AccessToken)
	}
	switch {
	case token == "":
		return "", errdefs.New(codes.Unauthenticated, "its response has no token")
	case !token.sendable():
		return "", errdefs.New(codes.Unauthenticated, "token has characters that are invalid in a header")
	}
	return token, nil
}

// tokenStatus returns the error for an unsuccessful response of a token server. It does not quote
// the server, because its text may contain tokens.
func tokenStatus(resp *http.Response) error {
	status := fmt.Sprintf("%d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	switch {
	case resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests:
		return busy(resp.Header, status)
	case resp.StatusCode == http.StatusForbidden:
		return errdefs.New(codes.PermissionDenied, "pull access denied: %s", status)
	}
	return errdefs.New(codes.Unauthenticated,
		"pull access denied, repository does not exist or may require authorization: %s", status)
}

// tokenError returns the displayable part of a failed exchange.
func tokenError(ctx context.Context, err error) error {
	if errors.Is(err, errTokenRedirect) || errors.Is(err, errPlainRedirect) {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		return errdefs.New(codes.Unauthenticated, "%w", err)
	}
	if isNetwork(err) || errdefs.Code(err) == codes.FailedPrecondition {
		return requestError(ctx, err)
	}
	return &UnavailableError{Err: errors.New("the request failed")}
}

// isNetwork reports whether an error is about the connection. Its text contains addresses and
// certificates, but nothing that a server sent.
func isNetwork(err error) bool {
	var u *url.Error
	if errors.As(err, &u) { // a net.Error itself
		err = u.Err
	}
	var n net.Error
	var cert *tls.CertificateVerificationError
	return errors.As(err, &n) || errors.As(err, &cert) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, context.Canceled) || errors.Is(err, errRedirects)
}

var (
	errTokenRedirect = errors.New("token server redirects the identity token to another host")
	errPlainRedirect = errors.New("token server redirects to a URL without TLS")
)

// checkTokenRedirect is checkRedirect for a token server. No other host gets the credentials.
// net/http would send the password to subdomains and other ports. It would send the body, which has
// the identity token, to any host.
func checkTokenRedirect(mayBePlain bool) func(*http.Request, []*http.Request) error {
	return func(r *http.Request, via []*http.Request) error {
		if r.URL.Scheme != "https" && !(r.URL.Scheme == "http" && mayBePlain) {
			return errPlainRedirect
		}
		if from := via[0].URL; from.Scheme != r.URL.Scheme || from.Host != r.URL.Host {
			if r.Body != nil && r.Body != http.NoBody {
				return errTokenRedirect
			}
			r.Header.Del("Authorization")
		}
		return checkRedirect(r, via)
	}
}
