package powercut

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/internal/testutil"
)

// TestPowerCutDuringUpgrade cuts the power while the first daemon of this version takes over the
// pods and images of a release, and works. The next boot, perhaps with another kernel, has the
// images. Its pods have ended.
func TestPowerCutDuringUpgrade(t *testing.T) {
	testutil.Long(t) // contrib/test -all builds the released versions
	bin := harness.Release(t, "0.2.0")
	for _, f := range filesystems {
		t.Run(f.name, func(t *testing.T) {
			f.usable(t)
			random := rand.New(rand.NewPCG(seed(t), 0))
			n := newNode(t, f)
			r := n.recordUpgrade(t, bin)
			for i := range f.cuts(t) {
				c := r.choose(random)
				t.Run(fmt.Sprint(i), func(t *testing.T) {
					t.Logf("the power fails at %v", c)
					found, end := n.comesBack(t, r, c)
					n.runsAll(t, found)
					n.checkRecords(t, "--bytes")
					n.Clean(t)
					end()
				})
			}
		})
	}
}

// recordUpgrade runs pods of a release on a new disk. The recording starts when that daemon has
// ended. The next daemon pulls and removes images.
func (n *node) recordUpgrade(t *testing.T, bin string) recording {
	t.Helper()
	names := slices.Sorted(maps.Keys(n.testImages))
	disk := n.newDisk(t)
	m := n.mount(t, disk, n.dir)
	n.UseVersion(t, bin)
	n.Start(t) // not boot, because the next daemon is of the same boot
	first := n.testImages[names[0]]
	n.Pull(t, first.name)
	pod := n.RunPod(t)
	running := pod.Run(t, harness.Image(first.id), harness.Script("sleep 1000"))
	pid := running.Pid(t)
	n.Stop(t)

	begin := disk.Position()
	n.UseVersion(t, "")
	n.Start(t)
	harness.Equal(t, "the container's process", running.Pid(t), pid)
	harness.Equal(t, "state of the pod", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	c := &churn{node: n, disk: disk, history: history{before: list(t, n.Daemon)}}
	harness.Must(t, c.pull(t.Context(), n.testImages[names[1]]))
	pod.Remove(t)
	for _, p := range []*testImage{first, n.testImages[names[1]]} {
		harness.Must(t, c.remove(t.Context(), p.id))
	}
	n.Stop(t)
	n.LoseState(t)
	m.unmount(t)
	t.Logf("recorded %d disk operations", disk.Position()-begin)
	return recording{disk, begin, c.history}
}

// runsAll runs a container of each of these images. It is serves for images of a release, whose
// layers have other names.
func (n *node) runsAll(t *testing.T, images known) {
	t.Helper()
	pod := n.RunPod(t)
	for name, p := range n.testImages {
		if images[p.id] != nil {
			harness.Equal(t, "content of image "+name, pod.Sh(t, "cat "+witness, harness.Image(p.id)), name)
		}
	}
	pod.Remove(t)
}
