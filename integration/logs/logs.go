// Package logs reads container logs as the CRI log format defines them, without berth's code. Each
// line has a time, a stream, a tag and a text. A malformed or incomplete line fails the test.
package logs

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// Line is one record of a CRI log.
type Line struct {
	Time    time.Time
	Stream  string
	Partial bool
	Text    string
}

// Read parses the log at path.
func Read(t *testing.T, path string) []Line {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var lines []Line
	for text := range strings.Lines(string(content)) {
		fields := strings.SplitN(strings.TrimSuffix(text, "\n"), " ", 4)
		if len(fields) != 4 || !strings.HasSuffix(text, "\n") {
			t.Fatalf("%s: not a CRI log record: %q", path, text)
		}
		at, err := time.Parse(time.RFC3339Nano, fields[0])
		if err != nil {
			t.Fatal(err)
		}
		if fields[2] != "F" && fields[2] != "P" {
			t.Fatalf("%s: tag is neither F nor P: %q", path, text)
		}
		lines = append(lines, Line{Time: at, Stream: fields[1], Partial: fields[2] == "P", Text: fields[3]})
	}
	return lines
}

// Numbered fails the test unless the lines contain the numbers from 1 on.
func Numbered(t *testing.T, lines []Line) {
	t.Helper()
	for i, l := range lines {
		if l.Text != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, l.Text)
		}
	}
}

// Text returns the text of the log.
func Text(lines []Line) string {
	var out strings.Builder
	for _, l := range lines {
		out.WriteString(l.Text)
		if !l.Partial {
			out.WriteByte('\n')
		}
	}
	return out.String()
}
