package trace

import (
	"encoding/hex"
	"strings"
)

// Remote is the span of another process that contains an operation (W3C Trace Context). kubelet
// sends its span with RunPodSandbox (KEP-2831). The zero value means no span.
type Remote struct {
	TraceID [16]byte
	SpanID  [8]byte
	Sampled bool
}

// Valid reports whether r names a span.
func (r Remote) Valid() bool { return r.TraceID != [16]byte{} && r.SpanID != [8]byte{} }

// ParseRemote parses a traceparent header. It returns the zero value for an invalid span. Later
// versions of the header may add fields but must keep these.
func ParseRemote(header string) Remote {
	fields := strings.Split(header, "-")
	if len(fields) < 4 || fields[0] == "ff" || fields[0] == "00" && len(fields) != 4 {
		return Remote{}
	}
	var version, flags [1]byte
	var r Remote
	for _, f := range []struct {
		text string
		into []byte
	}{{fields[0], version[:]}, {fields[1], r.TraceID[:]}, {fields[2], r.SpanID[:]}, {fields[3], flags[:]}} {
		if len(f.text) != hex.EncodedLen(len(f.into)) || f.text != strings.ToLower(f.text) {
			return Remote{}
		}
		if _, err := hex.Decode(f.into, []byte(f.text)); err != nil {
			return Remote{}
		}
	}
	r.Sampled = flags[0]&1 != 0
	if !r.Valid() {
		return Remote{}
	}
	return r
}
