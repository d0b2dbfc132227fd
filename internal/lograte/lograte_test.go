package lograte

import (
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestWarnLogsOncePerMinute(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	log := slog.New(slog.NewTextHandler(&out, nil))
	var s Limiter
	begin := time.Now()
	for _, after := range []time.Duration{0, 1, interval - 1, interval, interval + 1, 3 * interval} {
		s.warn(begin.Add(after), log, "trouble", "after", after)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		_, line, _ = strings.Cut(line, "msg=trouble ")
		got = append(got, strings.TrimSpace(line))
	}
	want := "after=0s suppressed=0, after=1m0s suppressed=2, after=3m0s suppressed=1"
	if strings.Join(got, ", ") != want {
		t.Errorf("logged %q", got)
	}
}
