package registry

import (
	"log/slog"
	"strings"
)

const redacted = "REDACTED"

// Secret is a password or token. It is printed, logged and marshaled as REDACTED. [Secret.Reveal]
// is the only access to its value.
type Secret string

// Reveal returns the secret itself.
func (s Secret) Reveal() string { return string(s) }

// sendable reports whether a token is valid in a header: RFC 6750 allows visible ASCII only.
func (s Secret) sendable() bool {
	return !strings.ContainsFunc(string(s), func(r rune) bool { return r <= ' ' || r > '~' })
}

// String implements fmt.Stringer.
func (Secret) String() string { return redacted }

// GoString implements fmt.GoStringer, for %#v.
func (Secret) GoString() string { return redacted }

// MarshalText implements encoding.TextMarshaler, for JSON.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }
