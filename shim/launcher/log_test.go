package launcher

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A launcher logs its failure in the daemon's format, with time and container. A request that the
// daemon has cancelled is no failure.
func TestLogFailure(t *testing.T) {
	failure := errors.New("no\nroom")
	for name, c := range map[string]struct {
		format string
		l      *launcher
		want   []string
	}{
		"text":              {"text", &launcher{container: "c1"}, []string{"time=", "level=ERROR", "container=c1", `error="no\nroom"`}},
		"without a request": {"", &launcher{}, []string{"time=", `error="no\nroom"`}},
		"at its start":      {"text", nil, []string{"time=", `error="no\nroom"`}},
		"JSON":              {"json", &launcher{container: "c1"}, []string{`"time":`, `"container":"c1"`, `"error":"no\nroom"`}},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			logFailure(&out, c.format, c.l, failure)
			for _, want := range c.want {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q has no %q", out.String(), want)
				}
			}
			if strings.Count(out.String(), "\n") != 1 || json.Valid(out.Bytes()) != (c.format == "json") {
				t.Errorf("%q is not one line of the form %q", out.String(), c.format)
			}
		})
	}
	for err, want := range map[error]bool{io.EOF: true, fmt.Errorf("send: %w", unix.EPIPE): true, fmt.Errorf("send: %w", unix.ECONNRESET): true, failure: false, unix.ENOMEM: false} {
		if daemonIsGone(err) != want {
			t.Errorf("daemonIsGone(%v) is %t", err, !want)
		}
	}
}
