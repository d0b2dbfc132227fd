package operator

import (
	"bytes"
	"testing"
	"time"

	"berth/cmd/berth/client"
	"berth/internal/testutil"
)

var frames = [][]client.Layer{
	{{Digest: "sha256:0123456789abcdef", State: "waiting"}, {Digest: "sha256:fedcba9876543210", State: "present", Done: 0, Total: 512}},
	{{Digest: "sha256:0123456789abcdef", State: "downloading", Done: 1_000_000, Total: 4_000_000}, {Digest: "sha256:fedcba9876543210", State: "present", Total: 512}},
	{{Digest: "sha256:0123456789abcdef", State: "downloading", Done: 5_000_000, Total: 4_000_000}, {Digest: "sha256:fedcba9876543210", State: "present", Total: 512}},
}

func TestProgressLines(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(0, 0)
	p := newProgress(&out, func() time.Time { now = now.Add(time.Second); return now })
	for _, f := range frames {
		p.update(f)
	}
	p.done()
	testutil.Golden(t, *updateGolden, "pull-lines.txt", out.String())
}
