package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// UnavailableError says that a registry could not be reached, or that it is failing or overloaded.
type UnavailableError struct {
	Err       error
	temporary bool          // an early retry may succeed
	after     time.Duration // the registry's Retry-After, or 0
}

func (e *UnavailableError) Error() string { return e.Err.Error() }
func (e *UnavailableError) Unwrap() error { return e.Err }

// corrupt returns an error for content that is not what its digest or size says. The next host may
// have the right one.
func corrupt(format string, args ...any) error {
	return errdefs.New(codes.DataLoss, format, args...)
}

// isCorrupt reports whether content has failed its checks.
func isCorrupt(err error) bool { return errdefs.Code(err) == codes.DataLoss }

// requestError converts the error of an HTTP round trip. It drops the URL, whose query may contain
// a token. The result is an UnavailableError unless ctx is done. The error of a dial timeout alone
// would look like the end of ctx.
func requestError(ctx context.Context, err error) error {
	var u *url.Error
	switch {
	case errors.Is(err, errRedirects) && errors.As(err, &u): // the text would name the URLs
		err = u.Err
	case errors.As(err, &u):
		err = fmt.Errorf("%s %s: %w", strings.ToUpper(u.Op), origin(u.URL), short(u.Err))
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %v", ctx.Err(), err)
	}
	var near *forbiddenTargetError
	if errors.As(err, &near) || errdefs.Code(err) == codes.FailedPrecondition { // or a folder in certs.d is invalid
		return errdefs.FailedPrecondition("%w", err)
	}
	return &UnavailableError{Err: err, temporary: isTemporary(err)}
}

// shortened is an error whose text is shortened and printable.
type shortened struct {
	text string
	err  error
}

func (s *shortened) Error() string { return s.text }
func (s *shortened) Unwrap() error { return s.err }

// short makes an error of net/http displayable. The text may quote a server's malformed header, or
// the address of a redirect, which may contain a token.
func short(err error) error {
	text := err.Error()
	if strings.Contains(text, "Location header") {
		text = "it redirects to an invalid URL"
	}
	return &shortened{errdefs.Clip(text), err}
}

// isTemporary reports whether a failed request is repeated soon. Timeouts, refused connections,
// unknown names and failed TLS handshakes are not temporary, because kubelet retries with a growing
// delay anyway.
func isTemporary(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// answerError is the error for an unsuccessful response.
type answerError struct {
	error
	status int
}

func (e *answerError) Unwrap() error { return e.error }

// statusError returns the *answerError for an unsuccessful response. It quotes the body only if the
// registry itself sent it. Otherwise a redirect could reveal a page that only the daemon can read
// to a user who sees its errors.
func statusError(resp *http.Response, own bool) error {
	text := errdefs.Clip(resp.Status)
	if own {
		text += registryMessage(resp)
	}
	var err error
	switch code := resp.StatusCode; {
	case code == http.StatusUnauthorized:
		err = errdefs.New(codes.Unauthenticated,
			"pull access denied, repository does not exist or may require authorization: %s", text)
	case code == http.StatusForbidden:
		err = errdefs.New(codes.PermissionDenied, "pull access denied: %s", text)
	case code == http.StatusNotFound:
		err = errdefs.NotFound("not found: %s", text)
	case code == http.StatusRequestTimeout, code == http.StatusTooManyRequests, code >= 500:
		err = busy(resp.Header, text)
	default:
		err = fmt.Errorf("unexpected answer: %s", text)
	}
	return &answerError{err, resp.StatusCode}
}

// registryMessage reads the distribution spec's error body.
func registryMessage(resp *http.Response) string {
	const limit = 64 << 10
	data, err := readLimited(resp.Body, limit)
	if err == nil {
		data, err = unpackJSON(data, resp.Header.Get("Content-Encoding"), limit)
	}
	var doc struct {
		Errors []struct{ Code, Message string }
	}
	if err != nil || decode(data, &doc) != nil || len(doc.Errors) == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s: %s)", errdefs.Clip(doc.Errors[0].Code), errdefs.Clip(doc.Errors[0].Message))
}

// busy returns the error of a server that fails or is overloaded. A server that asks for a longer
// pause than a pull should wait is not asked again.
func busy(h http.Header, text string) error {
	after := retryAfter(h)
	if after > maxRetryAfter {
		return &UnavailableError{Err: fmt.Errorf("%s, retry after %v", text, after.Round(time.Second))}
	}
	return &UnavailableError{Err: errors.New(text), temporary: true, after: after}
}

// retryAfter reads a Retry-After header: seconds or a date. A date counts from the server's own
// date, because the clocks may differ. A date in the past is no pause.
func retryAfter(h http.Header) time.Duration {
	const longest = 24 * time.Hour
	value := h.Get("Retry-After")
	if s, err := strconv.ParseFloat(value, 64); err == nil && !math.IsNaN(s) {
		return time.Duration(min(max(s, 0), longest.Seconds()) * float64(time.Second))
	}
	until, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(h.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return min(max(until.Sub(now), 0), longest)
}

// origin returns scheme and host of a URL, which are safe to show.
func origin(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "invalid URL"
	}
	return errdefs.Clip(u.Scheme + "://" + u.Host)
}
