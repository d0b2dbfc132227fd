package integration

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// slowRegistry sends a layer at an even rate until it is told to hurry.
type slowRegistry struct {
	name  string
	blob  []byte
	hurry chan struct{}
}

// newSlowRegistry pushes an image with one layer of some size.
func newSlowRegistry(t *testing.T, size int) *slowRegistry {
	t.Helper()
	r := harness.NewRegistry(t)
	layer := harness.PackLayer(t, fixture.Tree{fixture.File("file", 0o644, noise(size))}, fixture.Gzip)
	name, _ := harness.Push(t, r, "slow:latest", harness.Get(fixture.ImageOf(v1.Config{}, layer))(t))
	s := &slowRegistry{name: name, blob: blobOf(t, layer), hurry: make(chan struct{})}
	path := "/blobs/" + harness.DigestOf(t, layer)
	r.Hook(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, path) {
			return false
		}
		s.send(w)
		return true
	})
	return s
}

// send sends the layer with three MiB a second, which is faster than the slowest pull.
func (s *slowRegistry) send(w http.ResponseWriter) {
	const piece = 64 << 10
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	w.Header().Set("Content-Length", strconv.Itoa(len(s.blob)))
	for rest := s.blob; len(rest) > 0; {
		n := min(piece, len(rest))
		if _, err := w.Write(rest[:n]); err != nil {
			return // the client has left
		}
		rest = rest[n:]
		_ = http.NewResponseController(w).Flush() // the next Write reports it
		select {
		case <-tick.C:
		case <-s.hurry:
		}
	}
}

const slowedSeconds = "berth_image_pull_slowed_seconds_total"

// needsMemory makes a container wait for memory: the kernel stops its processes for up to two
// seconds at a time when they exceed memory.high. The waits do not depend on the speed of the disk.
func needsMemory(r *runtimeapi.LinuxContainerResources) {
	r.Unified = map[string]string{"memory.high": strconv.Itoa(4 << 20)}
}

// A pull becomes slower while a pod waits for memory, and ends as usual.
func TestPullsYieldToPods(t *testing.T) {
	if !machine.Cgroup2() {
		t.Skip("NOT TESTED: the kernel reports the pressure of pods only for cgroup v2")
	}
	d := harness.StartDaemon(t, harness.WithConfig("[pull]", "pressure_limit = 5"))
	pod := d.RunPod(t, harness.HostNetwork)
	s := newSlowRegistry(t, 64<<20)
	pulled := harness.Go(func() error {
		_, err := d.TryPull(t, s.name, nil)
		return err
	})
	harness.EventuallyTrue(t, "bytes arrive", func() bool { return keptBytes(d) > 0 })
	harness.Equal(t, "slowed before the pod waits", scrape(t, d)[slowedSeconds], 0)
	c := pod.Run(t, harness.Script("while :; do dd if=/dev/zero of=/dev/null bs=32M count=1 2>/dev/null; done"),
		harness.Resources(needsMemory))
	harness.EventuallyTrue(t, "the pull is slowed", func() bool { return scrape(t, d)[slowedSeconds] > 0 })
	c.Stop(t, 0)
	close(s.hurry)
	harness.Must(t, <-pulled)
	pod.Remove(t)
}

// The configured bandwidth limits a pull.
func TestPullBandwidth(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig("[pull]", "bandwidth = 1048576"))
	s := newSlowRegistry(t, 2<<20)
	close(s.hurry)
	harness.Equal(t, "slowed before the pull", scrape(t, d)[slowedSeconds], 0)
	d.Pull(t, s.name)
	if got := scrape(t, d)[slowedSeconds]; got == 0 {
		t.Error("the pull was not slowed")
	}
}
