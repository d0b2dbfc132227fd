package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"berth/image/registry/redirectguard"
	"berth/internal/errdefs"
)

// UnavailableError says that a registry could not be reached or answered that it
// is failing or overloaded.
type UnavailableError struct {
	Err       error
	temporary bool          // trying again soon may help
	after     time.Duration // the registry's Retry-After, 0 if it gave none
}

func (e *UnavailableError) Error() string { return e.Err.Error() }
func (e *UnavailableError) Unwrap() error { return e.Err }

// errStalled is the cause with which a transfer without bytes is cancelled.
var errStalled = errors.New("transfer stalled")

// corrupt returns an error for content that fails its checks.
func corrupt(format string, args ...any) error {
	return errdefs.New(codes.DataLoss, format, args...)
}

// requestError turns the error of an HTTP round trip into one of this package's:
// without the URL, whose query may hold a token, and as an UnavailableError
// unless it was ctx that ended (a dial that timed out says DeadlineExceeded, too).
func requestError(ctx context.Context, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = fmt.Errorf("%s %s: %w", strings.ToUpper(u.Op), origin(u.URL), short(u.Err))
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %v", ctx.Err(), err)
	}
	var near *redirectguard.ForbiddenTargetError
	if errors.As(err, &near) {
		return errdefs.FailedPrecondition("%w", err)
	}
	return &UnavailableError{Err: err, temporary: isTemporary(err)}
}

// shortened is an error with foreign text in it that is fit to be shown.
type shortened struct {
	text string
	err  error
}

func (s *shortened) Error() string { return s.text }
func (s *shortened) Unwrap() error { return s.err }

// short makes an error of net/http's fit to be shown. It may quote what a server sent: a malformed header, or the
// whole address of a redirect, which may hold a token.
func short(err error) error {
	text := err.Error()
	if strings.Contains(text, "Location header") {
		text = "it redirects to what is no URL"
	}
	return &shortened{errdefs.Clip(text), err}
}

// isTemporary reports whether a failed request is worth repeating at once. A
// timeout, a refused connection, an unknown name or a failed TLS handshake is
// not: kubelet comes back with a growing delay anyway.
func isTemporary(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// statusError returns the error for a response whose status is not a success.
// Text from the body is quoted only if the registry itself sent it: a redirect
// could make the daemon read a page for somebody who may only see its errors.
func statusError(resp *http.Response, own bool) error {
	text := errdefs.Clip(resp.Status)
	if own {
		text += registryMessage(resp.Body)
	}
	switch code := resp.StatusCode; {
	case code == http.StatusUnauthorized:
		return errdefs.New(codes.Unauthenticated, "pull access denied, repository does not exist or may require authorization: %s", text)
	case code == http.StatusForbidden:
		return errdefs.New(codes.PermissionDenied, "pull access denied: %s", text)
	case code == http.StatusNotFound:
		return errdefs.NotFound("not found: %s", text)
	case code == http.StatusRequestTimeout, code == http.StatusTooManyRequests, code >= 500:
		return &UnavailableError{Err: errors.New(text), temporary: true, after: retryAfter(resp.Header)}
	}
	return fmt.Errorf("unexpected answer: %s", text)
}

// registryMessage reads the distribution spec's error body.
func registryMessage(body io.Reader) string {
	data, err := io.ReadAll(io.LimitReader(body, 64<<10))
	if err != nil {
		return ""
	}
	var doc struct {
		Errors []struct{ Code, Message string }
	}
	if json.Unmarshal(data, &doc) != nil || len(doc.Errors) == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s: %s)", errdefs.Clip(doc.Errors[0].Code), errdefs.Clip(doc.Errors[0].Message))
}

// retryAfter reads the delay form of a Retry-After header.
func retryAfter(h http.Header) time.Duration {
	s, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || s < 0 {
		return 0
	}
	return time.Duration(min(s, 3600)) * time.Second
}

// origin returns scheme and host of a URL, the part that is safe to show.
func origin(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "invalid URL"
	}
	return errdefs.Clip(u.Scheme + "://" + u.Host)
}
