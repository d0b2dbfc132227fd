package verify_test

import (
	"strings"
	"testing"

	"berth/checkpoint/verify"
	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
)

// TestGolden checks that the images of an ordinary container have no difference.
func TestGolden(t *testing.T) {
	t.Parallel()
	for _, version := range verifytest.Versions {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			dir := verifytest.Open(t, verifytest.Images(t, version))
			r, err := verify.Container(dir, verifytest.ExpectedOf(t, version))
			testutil.Must(t, err)
			for _, d := range r.Differences {
				t.Error(d)
			}
			if len(r.Processes) != 2 || r.Processes[1].Parent != 1 || r.Memory == 0 || r.OpenFiles < 6 {
				t.Errorf("%+v", r)
			}
			if version != verifytest.Versions[0] {
				return
			}
			if r.Processes[0].Threads != 2 || r.Processes[0].Command != "prog" {
				t.Errorf("processes %+v", r.Processes)
			}
			if got := strings.Join(r.Sockets, ","); got != "unix /tmp/s.sock,tcp 0.0.0.0:8080 listening" {
				t.Errorf("sockets %s", got)
			}
			if r.OpenFiles < 20 {
				t.Errorf("%d open files", r.OpenFiles)
			}
		})
	}
}
