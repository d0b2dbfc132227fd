package powercut

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/lazy"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/powercut/blocklog"
	"berth/internal/testutil"
)

// lazyImage is the image whose large layer the daemon fills after the pull.
const lazyImage = "lazy"

// lazyFiles and lazyFileSize give the large layer about nine spans.
const lazyFiles, lazyFileSize = 8, 3<<20 + 4321

// lazyNode is a node whose pulls of lazyImage create incomplete layers.
type lazyNode struct {
	*node
	gate *fixture.Gate // of the large layer
	blob string        // its digest
	sums string        // output of reader
}

func newLazyNode(t *testing.T, f filesystem) *lazyNode {
	t.Helper()
	n := &lazyNode{node: &node{filesystem: f, testImages: map[string]*testImage{}}}
	tree := someFiles("data", lazyFiles, lazyFileSize)
	var sums strings.Builder
	for i, file := range tree[1:] {
		fmt.Fprintf(&sums, "%x  /data/%d\n", sha256.Sum256(file.Body), i)
	}
	n.sums = sums.String()
	layer := harness.PackLayer(t, tree, fixture.Gzip)
	own := harness.PackLayer(t, fixture.Tree{fixture.File(strings.TrimPrefix(witness, "/"), 0o644, lazyImage)}, fixture.Gzip)
	n.testImages[lazyImage] = push(t, lazyImage, harness.Get(fixture.Image(v1.Config{}, layer, own))(t))
	n.blob = harness.DigestOf(t, layer)
	n.gate = fixture.NewGate(n.blob)
	harness.Registry.Hook(n.gate.Hook)
	t.Cleanup(func() { harness.Registry.Hook(nil) })
	n.Daemon = harness.NewDaemon(t, harness.WithConfig(`lazy.policy = "on"`, "lazy.min_bytes = 1", `lazy.min_time = "0s"`), n.onDisk)
	return n
}

func (n *lazyNode) image() *testImage { return n.testImages[lazyImage] }

// lazyCuts returns the number of power failures while layers are filled.
func (f filesystem) lazyCuts(t *testing.T) int {
	t.Helper()
	switch {
	case os.Getenv("BERTH_CUTS") != "", harness.Thorough():
		return f.cuts(t)
	case testutil.AllTests():
		return f.lazy
	}
	return max(1, f.lazy/10)
}

// TestPowerCutLazy cuts the power while a layer is filled and read. The next boot fills it further,
// or pulls the image again. Each byte of each file is compared.
func TestPowerCutLazy(t *testing.T) {
	for _, f := range filesystems {
		t.Run(f.name, func(t *testing.T) {
			f.usable(t)
			random := rand.New(rand.NewPCG(seed(t), 0))
			n := newLazyNode(t, f)
			r := n.record(t, random, 3)
			found := map[string]int{}
			for i := range f.lazyCuts(t) {
				c := r.chooseFilling(random)
				t.Run(fmt.Sprint(i), func(t *testing.T) {
					t.Logf("the power fails at %v", c)
					found[n.survives(t, r, c, i%4 == 3)]++
				})
			}
			t.Logf("states of the image after the power failures: %v", found)
		})
	}
}

// chooseFilling is choose. Three of four power failures are between the begin of a pull and the
// removal of its image, while the layer is filled. The other steps write more.
func (r recording) chooseFilling(random *rand.Rand) cut {
	c := r.choose(random)
	pulls := slices.DeleteFunc(slices.Clone(r.history.changes), func(c change) bool { return c.begun < r.begin })
	if i := random.IntN(len(pulls)/2) * 2; random.IntN(4) > 0 { // each pull is followed by the removal
		c.position = pulls[i].begun + random.IntN(pulls[i+1].begun-pulls[i].begun+1)
	}
	return c
}

// record pulls, reads and removes the image on a new disk. The recording starts when the index of
// the large layer is there.
func (n *lazyNode) record(t *testing.T, random *rand.Rand, rounds int) recording {
	t.Helper()
	disk := n.newDisk(t)
	end := n.boot(t, disk)
	n.needEROFS(t)
	n.WaitIdle(t)
	n.Empty = n.Snapshot(t)
	c := &churn{node: n.node, disk: disk}
	harness.Must(t, c.pull(t.Context(), n.image()))
	n.layers = readLayers(t, n.store())
	n.waitIndex(t)
	harness.Must(t, c.remove(t.Context(), n.image().id))
	begin := disk.Position()
	for range rounds {
		n.fillOnce(t, random, c)
	}
	n.Clean(t)
	n.NoLeaks(t)
	end()
	t.Logf("recorded %d disk operations, %d of them flushes, while a layer was filled %d times",
		disk.Position()-begin, len(slices.DeleteFunc(disk.Flushes(), func(at int) bool { return at <= begin })), rounds)
	return recording{disk, begin, c.history}
}

func (n *lazyNode) needEROFS(t *testing.T) {
	t.Helper()
	status := harness.Get(n.Cri.Status(t.Context(), true))(t)
	if driver := status.Info["layerDriver"]; !strings.Contains(driver, "erofs") {
		t.Skip("NOT TESTED: lazy layers need EROFS layers, not ", driver)
	}
}

func (n *lazyNode) waitIndex(t *testing.T) {
	t.Helper()
	path := filepath.Join(n.store(), "indexes", strings.TrimPrefix(n.blob, "sha256:"), "registries") // its last file
	harness.Eventually(t, "the index is written", func() error { _, err := os.Stat(path); return err })
}

// fillOnce pulls the image lazily, and fills its layer in several steps while a container reads it.
// Each step ends with a flush.
func (n *lazyNode) fillOnce(t *testing.T, random *rand.Rand, c *churn) {
	t.Helper()
	n.gate.Shut()
	harness.Must(t, c.pull(t.Context(), n.image()))
	pod := n.RunPod(t)
	reading := pod.Run(t, harness.Image(n.image().id), reader(random.Perm(lazyFiles)))
	for recorded := -1; n.filling(t) > 0; recorded = n.recorded(t) {
		n.gate.Let(1)
		harness.Eventually(t, "a step of the filling is recorded", func() error {
			if n.filling(t) > 0 && n.recorded(t) == recorded {
				return errors.New("it is not")
			}
			return nil
		})
	}
	n.gate.Open()
	reading.WaitOutput(t, "end")
	harness.Equal(t, "sums", reading.Output(t), n.sums+"end\n")
	pod.Remove(t)
	harness.Must(t, c.remove(t.Context(), n.image().id))
}

// reader makes a container read all files of the large layer in an order, and print their sums in
// the order of their names.
func reader(order []int) harness.ContainerOption {
	return harness.Script(fmt.Sprintf("for f in %s; do sha256sum /data/$f; done > /sums; sort -k 2 /sums; echo end; exec sleep 1000",
		strings.Trim(fmt.Sprint(order), "[]")))
}

// incomplete returns the directories of incomplete layers.
func (n *lazyNode) incomplete() (dirs []string) {
	parent := filepath.Join(n.store(), "erofs", "lazy")
	for _, name := range machine.ReadDir(parent) {
		if st, err := os.Lstat(filepath.Join(parent, name)); err == nil && st.IsDir() && len(name) == 64 {
			dirs = append(dirs, filepath.Join(parent, name))
		}
	}
	return dirs
}

// filling returns the number of incomplete layers.
func (n *lazyNode) filling(t *testing.T) int { t.Helper(); return len(n.incomplete()) }

// large is the number of the large layer in the image. The base layer is incomplete for a moment,
// too.
const large = 1

// recorded returns the number of spans of the large layer that are recorded as filled.
func (n *lazyNode) recorded(t *testing.T) (sum int) {
	t.Helper()
	for _, dir := range n.incomplete() {
		if filepath.Base(dir) != n.image().layers[large] {
			continue
		}
		content, err := os.ReadFile(filepath.Join(dir, "filled"))
		if err != nil && !errors.Is(err, os.ErrNotExist) { // it may be complete now
			t.Fatal(err)
		}
		_, rest, _ := bytes.Cut(content, []byte("\n"))
		for _, b := range rest[:max(0, len(rest)-sha256.Size)] {
			sum += bits.OnesCount8(b)
		}
	}
	return sum
}

// survives boots the node from the disk after a power failure and checks everything. If again is
// set, the power fails once more while the layer is filled further. It returns the state of the
// image.
func (n *lazyNode) survives(t *testing.T, r recording, c cut, again bool) (state string) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", n.Tail())
		}
	})
	if again {
		r = n.interruptedFilling(t, r, c)
		c = r.choose(rand.New(rand.NewPCG(c.seed, 2)))
		t.Logf("the power fails again at %v", c)
	}
	recorded := n.recordedOn(t, c.of(t, r.disk))

	n.gate.Shut()
	end := n.boot(t, c.of(t, r.disk))
	defer n.gate.Open()
	allowed, what := r.history.at(c.position)
	found := list(t, n.Daemon)
	if !slices.ContainsFunc(allowed, found.equal) {
		t.Errorf("%s: the images are %v, want one of %v", what, found, allowed)
	}
	n.ready(t)
	n.podsAreGone(t)
	n.removeSetAside(t)
	n.checkRecords(t)
	state = n.state(t, found, recorded)
	n.readsRight(t, found)
	n.checkRecords(t, "--bytes")
	n.Clean(t)
	n.NoLeaks(t)
	end()
	return state
}

// recordedOn checks the complete layers of a disk before a daemon starts, and returns the number of
// spans that are recorded as filled.
func (n *lazyNode) recordedOn(t *testing.T, disk *blocklog.Disk) int {
	t.Helper()
	m := n.mount(t, disk, n.dir)
	defer m.unmount(t)
	n.layersAreRight(t, "before the boot", "/filled", "/index") // the next boot removes these
	return n.recorded(t)
}

// state returns the state of the image after a boot. A layer must have what is recorded as filled.
func (n *lazyNode) state(t *testing.T, found known, recorded int) string {
	t.Helper()
	if found[n.image().id] == nil {
		return "absent"
	}
	status := harness.Get(n.Images.ImageStatus(t.Context(), &runtimeapi.ImageSpec{Image: n.image().id}, true))(t)
	var info struct {
		Lazy *lazy.Status `json:"lazy"`
	}
	harness.Must(t, json.Unmarshal([]byte(status.Info["info"]), &info))
	if info.Lazy == nil || !info.Lazy.Layers[large].Incomplete {
		return "complete"
	}
	l := info.Lazy.Layers[large]
	t.Logf("%d spans are recorded as filled, %d of %d bytes of the blob", recorded, l.Fetched, l.Size)
	if recorded > 0 && l.Fetched == 0 {
		t.Error("the recorded spans are fetched again")
	}
	if recorded == 0 {
		return "incomplete, nothing filled"
	}
	return "incomplete, partly filled"
}

// readsRight reads all files of the image while its layer is filled, and after that. It pulls the
// image if the power failure has undone the pull.
func (n *lazyNode) readsRight(t *testing.T, found known) {
	t.Helper()
	if found[n.image().id] == nil {
		n.gate.Open() // the daemon may have lost the index
		n.Pull(t, n.image().name)
	}
	pod := n.RunPod(t)
	reading := pod.Run(t, harness.Image(n.image().id), reader(rand.Perm(lazyFiles)))
	n.gate.Open()
	reading.WaitOutput(t, "end")
	harness.Equal(t, "sums while the layer is filled", reading.Output(t), n.sums+"end\n")
	harness.EventuallyGot(t, "all layers are complete", func() (bool, any) { left := n.filling(t); return left == 0, left })
	if n.ImageStatus(t, n.image().id) == nil {
		t.Error("the image was removed")
	}
	harness.Equal(t, "sums of the complete layer", pod.Sh(t, "cd /; sha256sum /data/*", harness.Image(n.image().id),
		harness.ContainerNamed("complete")), n.sums)
	n.layersAreRight(t, "after the layer was filled")
	pod.Remove(t)
}

// interruptedFilling boots from the disk after a power failure, fills and reads the layer for a
// while, and returns the disk.
func (n *lazyNode) interruptedFilling(t *testing.T, r recording, c cut) recording {
	t.Helper()
	disk := c.of(t, r.disk)
	n.gate.Shut()
	end := n.boot(t, disk)
	again := &churn{node: n.node, disk: disk, history: history{before: list(t, n.Daemon)}}
	harness.Must(t, again.pull(context.WithoutCancel(t.Context()), n.image()))
	pod := n.RunPod(t)
	pod.Run(t, harness.Image(n.image().id), reader(rand.Perm(lazyFiles)))
	before := n.recorded(t)
	n.gate.Let(2)
	harness.Eventually(t, "the layer is filled further", func() error {
		if n.filling(t) > 0 && n.recorded(t) <= before {
			return errors.New("it is not")
		}
		return nil
	})
	n.LosePower(t)
	n.LoseCgroups(t)
	end()
	return recording{disk, 0, again.history}
}
