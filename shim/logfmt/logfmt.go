// Package logfmt turns a container's output into the records of a CRI log file:
//
//	2016-10-06T00:17:09.669794202Z stdout F The content of the line
//
// timestamp (RFC 3339, nanoseconds, UTC), stream, tag, content. Tag F marks the
// end of a line, P a piece of a line that goes on in the stream's next record.
// The format is Kubernetes' (pkg/kubelet/kuberuntime/logs). The package is pure,
// and light enough for the monitor.
package logfmt

import (
	"bytes"
	"time"
)

// DefaultMaxLine is how many bytes of content one record has at most if nothing
// else is asked for: 16 KiB, as containerd's max_container_log_line_size.
const DefaultMaxLine = 16 << 10

// Overhead is how many bytes a record is longer than its content, at most.
const Overhead = len("2006-01-02T15:04:05.999999999Z stdout F \n")

// AppendTime appends t as records have it. One timestamp may serve many records.
func AppendTime(dst []byte, t time.Time) []byte {
	return t.UTC().AppendFormat(dst, time.RFC3339Nano)
}

// Encoder encodes one stream. A line without an end yet is held back until its
// end arrives, or it grows beyond the maximum, or Flush is called.
type Encoder struct {
	stream string
	max    int
	held   []byte
}

// NewEncoder returns an Encoder for the stream "stdout" or "stderr" that splits
// lines longer than max bytes (DefaultMaxLine if max is not positive).
func NewEncoder(stream string, max int) *Encoder {
	if max <= 0 {
		max = DefaultMaxLine
	}
	return &Encoder{stream: stream, max: max}
}

// Append appends the records of data to dst as far as they fit into dst's
// capacity, and returns dst and the data that did not fit. An empty dst with
// room for the maximum plus Overhead bytes takes at least one record.
func (e *Encoder) Append(dst, timestamp, data []byte) (out, rest []byte) {
	for len(data) > 0 {
		line, size, tag := e.cut(data)
		if tag == 0 {
			e.held = append(e.held, data...)
			return dst, nil
		}
		if len(dst)+Overhead+len(e.held)+len(line) > cap(dst) {
			return dst, data
		}
		dst = e.record(dst, timestamp, tag, line)
		data = data[size:]
	}
	return dst, nil
}

// cut finds the next record's content in data, to be appended to what is held:
// how many bytes of data it uses up, and its tag, 0 if the line is not complete.
func (e *Encoder) cut(data []byte) (line []byte, size int, tag byte) {
	room := e.max - len(e.held)
	end := bytes.IndexByte(data[:min(len(data), room+1)], '\n')
	switch {
	case end >= 0:
		return data[:end], end + 1, 'F'
	case len(data) > room:
		return data[:room], room, 'P'
	}
	return nil, 0, 0
}

// Flush appends the piece of a line that is held back, if any, as a partial
// record: the stream has ended in the middle of a line. dst may grow.
func (e *Encoder) Flush(dst, timestamp []byte) []byte {
	if len(e.held) == 0 {
		return dst
	}
	return e.record(dst, timestamp, 'P', nil)
}

func (e *Encoder) record(dst, timestamp []byte, tag byte, line []byte) []byte {
	dst = append(dst, timestamp...)
	dst = append(dst, ' ')
	dst = append(dst, e.stream...)
	dst = append(dst, ' ', tag, ' ')
	dst = append(dst, e.held...)
	dst = append(dst, line...)
	e.held = e.held[:0]
	return append(dst, '\n')
}
