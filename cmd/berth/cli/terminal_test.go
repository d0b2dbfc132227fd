package cli

import (
	"bytes"
	"flag"
	"strings"
	"testing"
	"time"

	"berth/cmd/berth/client"
	"berth/internal/testutil"
)

var updateGolden = flag.Bool("update", false, "rewrite the golden files")

var frames = [][]client.Layer{
	{{Digest: "sha256:0123456789abcdef", State: "waiting"}, {Digest: "sha256:fedcba9876543210", State: "present", Done: 0, Total: 512}},
	{{Digest: "sha256:0123456789abcdef", State: "downloading", Done: 1_000_000, Total: 4_000_000}, {Digest: "sha256:fedcba9876543210", State: "present", Total: 512}},
	{{Digest: "sha256:0123456789abcdef", State: "downloading", Done: 5_000_000, Total: 4_000_000}, {Digest: "sha256:fedcba9876543210", State: "present", Total: 512}},
}

func TestProgressLines(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(0, 0)
	p := NewProgress(&out, func() time.Time { now = now.Add(time.Second); return now })
	for _, f := range frames {
		p.Update(f)
	}
	p.Done(true)
	testutil.Golden(t, *updateGolden, "pull-lines.txt", out.String())
}

func TestProgressBars(t *testing.T) {
	var out bytes.Buffer
	for _, width := range []int{80, 50, 20} {
		p := &bars{out: &out, width: width, height: 24}
		for _, f := range frames {
			p.Update(f)
		}
		p.Done(true)
	}
	testutil.Golden(t, *updateGolden, "pull-bars.txt", strings.ReplaceAll(out.String(), "\x1b", "ESC"))
	for line := range strings.Lines(out.String()) {
		if !strings.Contains(line, "0123") {
			continue
		}
		if bar, _, _ := strings.Cut(line[strings.Index(line, "0123"):], "\x1b"); len(bar) >= 80 {
			t.Errorf("line %q wraps", bar)
		}
	}
}

// With more layers than lines, unfinished layers must be shown first.
func TestProgressBarsFit(t *testing.T) {
	var out bytes.Buffer
	p := &bars{out: &out, width: 60, height: 3}
	layers := []client.Layer{
		{Digest: "sha256:a", State: stateDone}, {Digest: "sha256:b", State: "downloading"}, {Digest: "sha256:c", State: statePresent},
		{Digest: "sha256:d", State: "waiting"}, {Digest: "sha256:e", State: "waiting"},
	}
	p.Update(layers)
	p.Update(layers)
	want := "\rb downloading\x1b[K\n\rd waiting\x1b[K\n"
	if got := out.String(); got != want+"\x1b[2A"+want {
		t.Errorf("%q", got)
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_960: "1.0 MB", 1 << 63: "9.2 EB"} {
		if got := Bytes(n); got != want {
			t.Errorf("size of %d: %q, want %q", n, got, want)
		}
	}
}

func TestAge(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", time.Minute: "1m", 119 * time.Minute: "1h", 47 * time.Hour: "47h", 49 * time.Hour: "2d",
	} {
		if got := Age(now, now.Add(-d)); got != want {
			t.Errorf("age of %s: %q, want %q", d, got, want)
		}
	}
}
