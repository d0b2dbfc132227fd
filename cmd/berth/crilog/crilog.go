// Package crilog reads container log files in the CRI format, and follows them while they grow and
// while they are rotated.
//
// # Format
//
// One record per line, as kubelet reads it (k8s.io/cri-client/pkg/logs):
//
//	2026-01-02T15:04:05.999999999Z stdout F the content\n
//
// The third word is a colon-separated list of tags. The first tag is F (the record ends a line of
// the container's output) or P (the line continues).
//
// # Rotation
//
// kubelet renames the file and asks the runtime to reopen it. The old file may grow until the
// writer has the new one. Read leaves the old file only when the new file has content, so it loses
// no line.
//
// # Why not k8s.io/cri-client/pkg/logs
//
// Its ReadLogs opens the new file at once, and loses lines that are still written to the old file.
// It reads lines of any length into memory, and only logs malformed records. It does not wait for a
// missing file or notice a truncated one. It writes to two io.Writers, but berth run needs whole
// lines.
package crilog

import (
	"bytes"
	"fmt"
	"time"
)

// Stream names the output stream of a record.
type Stream string

// The streams of a container. If the container has a terminal, all output is Stdout.
const (
	Stdout Stream = "stdout"
	Stderr Stream = "stderr"
)

// Record is one record of a log file, or a whole line joined from several records.
type Record struct {
	Time    time.Time // when the runtime has read it; for a joined line, the time of its first part
	Stream  Stream
	Partial bool   // the line continues in the next record of the same stream
	Content []byte // without the newline
}

// Parse decodes a line of a log file, with or without its newline. The record's content is a part
// of line, not a copy.
func Parse(line []byte) (Record, error) {
	rest := bytes.TrimSuffix(line, []byte{'\n'})
	stamp, rest, ok := bytes.Cut(rest, []byte{' '})
	if !ok {
		return Record{}, fmt.Errorf("log record %q: no space after the time", clip(line))
	}
	at, err := time.Parse(time.RFC3339Nano, string(stamp))
	if err != nil {
		return Record{}, fmt.Errorf("log record %q: time: %w", clip(line), err)
	}
	stream, rest, ok := bytes.Cut(rest, []byte{' '})
	if !ok || (Stream(stream) != Stdout && Stream(stream) != Stderr) {
		return Record{}, fmt.Errorf("log record %q: stream is neither stdout nor stderr", clip(line))
	}
	tags, content, ok := bytes.Cut(rest, []byte{' '})
	if !ok {
		return Record{}, fmt.Errorf("log record %q: no tag", clip(line))
	}
	partial, err := parseTags(tags)
	if err != nil {
		return Record{}, fmt.Errorf("log record %q: %w", clip(line), err)
	}
	return Record{Time: at, Stream: Stream(stream), Partial: partial, Content: content}, nil
}

// parseTags reports whether the tag list marks a partial record. Tags after the
// first are reserved by the format and ignored.
func parseTags(tags []byte) (partial bool, err error) {
	first, _, _ := bytes.Cut(tags, []byte{':'})
	switch string(first) {
	case "P":
		return true, nil
	case "F":
		return false, nil
	}
	return false, fmt.Errorf("tag %q is neither P nor F", first)
}

// clip shortens a line for an error text.
func clip(line []byte) []byte {
	const most = 64
	if len(line) > most {
		return line[:most]
	}
	return line
}
