package trace

import (
	"encoding/hex"
	"strings"
)

// Remote is the span of another process that an operation is part of, as W3C's Trace Context describes it: kubelet's, when it
// asks for a pod (KEP-2831). Its zero value means none.
type Remote struct {
	TraceID [16]byte
	SpanID  [8]byte
	Sampled bool
}

// Valid tells whether there is one.
func (r Remote) Valid() bool { return r.TraceID != [16]byte{} && r.SpanID != [8]byte{} }

// ParseRemote reads a traceparent header: none if it is none. Versions to come may add fields, and must keep these.
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
