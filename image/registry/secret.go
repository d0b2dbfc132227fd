package registry

import "log/slog"

const redacted = "REDACTED"

// Secret is a password or token. However it is printed, logged or marshalled,
// it shows as REDACTED; Reveal is the only way to its value.
type Secret string

// Reveal returns the secret itself.
func (s Secret) Reveal() string { return string(s) }

// String implements fmt.Stringer.
func (Secret) String() string { return redacted }

// GoString implements fmt.GoStringer, for %#v.
func (Secret) GoString() string { return redacted }

// MarshalText implements encoding.TextMarshaler, for JSON.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }
