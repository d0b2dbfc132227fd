package registry

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	"berth/internal/errdefs"
)

// malformed returns an error for a document that has the right digest, but is no valid document.
// Another host would send the same document.
func malformed(format string, args ...any) error { return errdefs.FailedPrecondition(format, args...) }

// decode decodes a JSON document. It accepts a byte order mark, as RFC 8259 allows. The error names
// the field, but does not quote the document.
func decode(data []byte, v any) error {
	if err := checkValues(data); err != nil {
		return err
	}
	err := json.Unmarshal(bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")), v)
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case len(bytes.TrimSpace(data)) == 0:
		return malformed("invalid JSON: it is empty")
	case errors.As(err, &syntax):
		return malformed("invalid JSON: byte %d: %s", syntax.Offset, errdefs.Clip(syntax.Error()))
	case errors.As(err, &kind):
		return malformed("%s", typeFault(kind))
	}
	return malformed("a field is not valid: %s", errdefs.Clip(err.Error())) // a time
}

// typeFault names the field that has another type, but not its value.
func typeFault(err *json.UnmarshalTypeError) string {
	found, _, _ := strings.Cut(err.Value, " ") // without the array index
	where := "the document"
	if err.Field != "" {
		where = fmt.Sprintf("field %q", errdefs.Clip(err.Field))
	}
	return fmt.Sprintf("%s is not valid: %s expected, not %s", where, kindName(err.Type), found)
}

// kindName returns the JSON name of a Go type.
func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "bool"
	case reflect.Slice, reflect.Array:
		return "array"
	case reflect.Map, reflect.Struct, reflect.Pointer:
		return "object"
	}
	return "number"
}

// unpackJSON returns a document without its Content-Encoding. Berth does not request one, but some
// hosts store documents with gzip and serve them to everybody (containerd#8166). limit is in bytes.
func unpackJSON(data []byte, encoding string, limit int64) ([]byte, error) {
	if err := checkLimit(data, limit); err != nil {
		return nil, err
	}
	if bytes.HasPrefix(data, []byte("\x1f\x8b")) { // no JSON begins so
		z, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			return nil, corrupt("decompress: %w", err)
		}
		plain, err := readLimited(z, limit)
		if err != nil {
			return nil, corrupt("decompress: %w", err)
		}
		return plain, checkLimit(plain, limit)
	}
	switch strings.ToLower(encoding) {
	case "", "identity", "gzip", "x-gzip": // a proxy may have decompressed it
		return data, nil
	}
	return nil, malformed("it has the Content-Encoding %q; only gzip is supported", errdefs.Clip(encoding))
}

// readLimited reads a document up to one byte more than limit.
func readLimited(body io.Reader, limit int64) ([]byte, error) {
	return io.ReadAll(io.LimitReader(body, limit+1))
}

func checkLimit(data []byte, limit int64) error {
	if int64(len(data)) > limit {
		return malformed("larger than the limit of %d bytes", limit)
	}
	return nil
}

// checkValues rejects JSON with more than MaxValues values before it is decoded. The content of
// strings does not count.
func checkValues(data []byte) error {
	values, inString := 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case c == '"':
			inString = !inString
		case inString && c == '\\':
			i++
		case !inString && (c == ',' || c == '{' || c == '['):
			values++
		}
	}
	if values > MaxValues {
		return malformed("%d JSON values, more than the limit of %d", values, MaxValues)
	}
	return nil
}

// schemaVersion is the schemaVersion of a document. Only version 1, Docker's schema 1, matters. So
// another spelling of 2, or a missing version (oras-go#934), is accepted.
type schemaVersion string

// UnmarshalJSON implements json.Unmarshaler.
func (v *schemaVersion) UnmarshalJSON(data []byte) error {
	var value any
	if err := json.Unmarshal(data, &value); err != nil {
		return err
	}
	*v = ""
	if value != nil {
		*v = schemaVersion(fmt.Sprint(value))
	}
	return nil
}
