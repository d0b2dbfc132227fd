package powercut

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/powercut/blocklog"
	"berth/internal/testutil"
)

// cuts returns the number of power failures on a filesystem: BERTH_CUTS, or all with
// BERTH_TORTURE=1, or a few.
func (f filesystem) cuts(t *testing.T) int {
	t.Helper()
	if text := os.Getenv("BERTH_CUTS"); text != "" {
		n := harness.Get(strconv.Atoi(text))(t)
		return n
	}
	if harness.Thorough() {
		return 200
	}
	if testutil.AllTests() {
		return f.few
	}
	return max(1, f.few/4)
}

// seed returns the seed of all random choices.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := rand.Uint64()
	if text := os.Getenv("BERTH_SEED"); text != "" {
		var err error
		s, err = strconv.ParseUint(text, 10, 64)
		harness.Must(t, err)
	}
	t.Logf("BERTH_SEED=%d", s)
	return s
}

func TestPowerCut(t *testing.T) {
	for _, f := range filesystems {
		t.Run(f.name, func(t *testing.T) {
			f.usable(t)
			random := rand.New(rand.NewPCG(seed(t), 0))
			n := newNode(t, f)
			r := n.record(t, random, 40, 24)
			for i := range f.cuts(t) {
				c := r.choose(random)
				t.Run(fmt.Sprint(i), func(t *testing.T) {
					t.Logf("the power fails at %v", c)
					n.survives(t, r, c, i%4 == 3)
				})
			}
		})
	}
}

// cut is one power failure.
type cut struct {
	position int
	loss     blocklog.Loss
	seed     uint64 // selects the lost writes
}

func (c cut) String() string {
	return fmt.Sprintf("%d, keeping %.2f of unflushed writes, seed %d", c.position, c.loss.Kept, c.seed)
}

// choose selects a power failure. Half of them are near a flush, because large contiguous writes
// fill most of the log, and their positions hardly differ.
func (r recording) choose(random *rand.Rand) cut {
	last := r.disk.Position()
	position := r.begin + random.IntN(last-r.begin+1)
	flushes := slices.DeleteFunc(r.disk.Flushes(), func(after int) bool { return after <= r.begin })
	if len(flushes) > 0 && random.IntN(2) == 0 {
		position = min(flushes[random.IntN(len(flushes))]+random.IntN(3)-1, last)
	}
	kept := []float64{0, 0.1, 0.5, 0.9, 1}[random.IntN(5)]
	return cut{position, blocklog.Loss{Kept: kept, Atomic: atomic}, random.Uint64()}
}

func (c cut) of(t *testing.T, disk *blocklog.Disk) *blocklog.Disk {
	t.Helper()
	left := harness.Get(disk.Cut(t.TempDir(), c.position, c.loss, rand.New(rand.NewPCG(c.seed, 1))))(t)
	t.Cleanup(func() { harness.Must(t, left.Close()) })
	return left
}

// survives boots the node from the disk after a power failure and checks everything. If again is
// set, the power fails once more during recovery, and survives checks the disk after that.
func (n *node) survives(t *testing.T, r recording, c cut, again bool) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", n.Tail())
		}
	})
	if again {
		r = n.interruptedRecovery(t, r, c)
		c = r.choose(rand.New(rand.NewPCG(c.seed, 2)))
		t.Logf("the power fails again at %v", c)
	}
	n.visibleLayersAreWhole(t, c.of(t, r.disk))

	found, end := n.comesBack(t, r, c)
	n.checkRecords(t)
	n.serves(t, found)
	n.pullsEverything(t)
	n.checkRecords(t, "--bytes")
	n.Clean(t)
	n.NoLeaks(t)
	end()
}

// comesBack boots the node from the disk after a power failure. It returns the images, which must
// be those of the time of the failure, and a function that ends the daemon. No pod may be left.
func (n *node) comesBack(t *testing.T, r recording, c cut) (found known, end func()) {
	t.Helper()
	end = n.boot(t, c.of(t, r.disk))
	allowed, what := r.history.at(c.position)
	found = list(t, n.Daemon)
	if !slices.ContainsFunc(allowed, found.equal) {
		t.Errorf("%s: the images are %v, want one of %v", what, found, allowed)
	}
	n.ready(t)
	n.podsAreGone(t)
	n.removeSetAside(t)
	return found, end
}

// interruptedRecovery boots from the disk after a power failure, pulls images, kills the daemon,
// and returns the disk.
func (n *node) interruptedRecovery(t *testing.T, r recording, c cut) recording {
	t.Helper()
	disk := c.of(t, r.disk)
	end := n.boot(t, disk)
	again := &churn{node: n, disk: disk, history: history{before: list(t, n.Daemon)}}
	for _, name := range slices.Sorted(maps.Keys(n.testImages)) {
		harness.Must(t, again.pull(t.Context(), n.testImages[name]))
	}
	n.Kill(t)
	end()
	return recording{disk, 0, again.history}
}

// visibleLayersAreWhole checks the layers before a daemon starts. Each layer at its final path must
// have the expected content.
func (n *node) visibleLayersAreWhole(t *testing.T, disk *blocklog.Disk) {
	t.Helper()
	m := n.mount(t, disk, n.dir)
	defer m.unmount(t)
	n.layersAreRight(t, "before the boot")
}

// layersAreRight compares all layers with the expected ones. Files with the names extra may exist.
func (n *node) layersAreRight(t *testing.T, when string, extra ...string) {
	t.Helper()
	for name, found := range readLayers(t, n.store()) {
		for _, file := range extra {
			delete(found, file)
		}
		want, ok := n.layers[name]
		if !ok {
			t.Errorf("%s: no image has the layer %s", when, name)
			continue
		}
		if diff := found.Difference(want); len(diff) > 0 {
			t.Errorf("%s: %s:\n  %s", when, name, strings.Join(diff, "\n  "))
		}
	}
}

// hasLayers checks that no layer of an image is missing.
func (n *node) hasLayers(t *testing.T, p *testImage) {
	t.Helper()
	for _, layer := range p.layers {
		there := func(root string) bool { return slices.Contains(machine.ReadDir(filepath.Join(root, "layers")), layer) }
		if !slices.ContainsFunc(image.LayerRoots(n.store()), there) {
			t.Errorf("image %s: its layer %s is missing", p.name, layer)
		}
	}
}

func (n *node) ready(t *testing.T) {
	t.Helper()
	harness.Eventually(t, "the node is ready", func() error {
		status := harness.Get(n.Cri.Status(t.Context(), false))(t)
		for _, c := range status.Status.Conditions {
			if !c.Status {
				return fmt.Errorf("%s: %s: %s", c.Type, c.Reason, c.Message)
			}
		}
		return nil
	})
}

// podsAreGone checks that pods and containers have exited, that they can be removed, and that their
// addresses are released.
func (n *node) podsAreGone(t *testing.T) {
	t.Helper()
	containers := harness.Get(n.Cri.ListContainers(t.Context(), nil))(t)
	for _, c := range containers {
		harness.Equal(t, "state of container "+c.Id, c.State, runtimeapi.ContainerState_CONTAINER_EXITED)
	}
	pods := harness.Get(n.Cri.ListPodSandbox(t.Context(), nil))(t)
	for _, p := range pods {
		harness.Equal(t, "state of pod "+p.Id, p.State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
		harness.Must(t, n.Cri.StopPodSandbox(t.Context(), p.Id))
		harness.Must(t, n.Cri.RemovePodSandbox(t.Context(), p.Id))
	}
	err := harness.WaitFor(func() error {
		if left := n.addresses(); len(left) > 0 {
			return fmt.Errorf("%q", left)
		}
		return nil
	})
	if err != nil {
		t.Errorf("addresses without a pod: %v", err)
	}
	t.Logf("%d pods and %d containers were recorded", len(pods), len(containers))
}

// addresses returns host-local's addresses with the content of their files.
func (n *node) addresses() (all []string) {
	dir := filepath.Join(n.DataDir, "test")
	for _, name := range machine.ReadDir(dir) {
		if net.ParseIP(name) != nil {
			all = append(all, name+": "+strings.Join(machine.ReadLines(filepath.Join(dir, name)), " "))
		}
	}
	return all
}

// serves runs a container of each of these images, in a pod with a network.
func (n *node) serves(t *testing.T, images known) {
	t.Helper()
	if len(images) == 0 {
		return
	}
	pod := n.RunPod(t)
	for _, name := range slices.Sorted(maps.Keys(n.testImages)) {
		if p := n.testImages[name]; images[p.id] != nil {
			n.hasLayers(t, p)
			harness.Equal(t, "content of image "+name, pod.Sh(t, "cat "+witness, harness.Image(p.id)), name)
		}
	}
	pod.Remove(t)
}

// pullsEverything pulls all images, and checks all their layers.
func (n *node) pullsEverything(t *testing.T) {
	t.Helper()
	n.Pull(t, harness.BaseImage)
	for _, p := range n.testImages {
		harness.Equal(t, "ID of "+p.name, n.Pull(t, p.name), p.id)
		n.hasLayers(t, p)
	}
	n.layersAreRight(t, "after all images were pulled")
}

// checkRecords checks by `berth check --state` that the records match the machine. It waits,
// because the daemon removes objects without a record in the background.
func (n *node) checkRecords(t *testing.T, args ...string) {
	t.Helper()
	err := harness.WaitFor(func() error {
		var differences []error
		for _, d := range n.StateCheck(t, args...) {
			differences = append(differences, errors.New(d.Text()))
		}
		return errors.Join(differences...)
	})
	if err != nil {
		t.Error(err)
	}
}

// removeSetAside removes the records that were set aside, because berth never does. Only records of
// pods and containers may be among them, because berth does not sync these.
func (n *node) removeSetAside(t *testing.T) {
	t.Helper()
	for _, kind := range []string{"pods", "containers"} {
		dir := filepath.Join(n.Root, kind, "set-aside")
		if names := machine.ReadDir(dir); len(names) > 0 {
			t.Logf("%d records of %s were set aside", len(names), kind)
		}
		harness.Must(t, os.RemoveAll(dir))
	}
	if err := syscall.Rmdir(filepath.Join(n.store(), "records", "set-aside")); err != nil && !errors.Is(err, syscall.ENOENT) {
		t.Errorf("records of images were set aside: %v", err)
	}
}
