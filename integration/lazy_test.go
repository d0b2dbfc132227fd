package integration

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	"berth/image/blobindex"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/internal/testutil"
)

// lazyNode is a daemon with an image that its next pull creates lazily.
type lazyNode struct {
	*harness.Daemon
	registry *fixture.Registry
	gate     *fixture.Gate
	image    string // its name
	blob     string // digest of its layer
	files    map[string]string
	proofs   int // large requests with which a pull proves that the registry has the blob
}

// lazyFiles are the names of the files of the lazy layer.
var lazyFiles = []string{"one", "two", "three", "four"}

// lazyOptions are options of all lazy nodes. Each layer with an index counts.
var lazyOptions = []string{`lazy.policy = "on"`, "lazy.min_bytes = 1", `lazy.min_time = "0s"`}

// startLazyNode starts a daemon, and pulls and removes an image. Its index stays.
func startLazyNode(t *testing.T, options ...string) *lazyNode {
	t.Helper()
	return startLazyNodeWith(t, v1.Config{}, nil, options...)
}

// startLazyNodeWith is startLazyNode for an image with a configuration and more files.
func startLazyNodeWith(t *testing.T, config v1.Config, tree fixture.Tree, options ...string) *lazyNode {
	t.Helper()
	n := &lazyNode{registry: harness.NewRegistry(t), files: map[string]string{}}
	for i, name := range lazyFiles {
		n.files[name] = noise(4<<20 + i*1000)
		tree = append(tree, fixture.File(name, 0o644, n.files[name]))
	}
	layer := harness.PackLayer(t, tree, fixture.Gzip)
	n.blob = harness.DigestOf(t, layer)
	n.gate = fixture.NewGate(n.blob)
	n.registry.Hook(n.gate.Hook)
	n.image, _ = harness.Push(t, n.registry, "lazy:latest", harness.Get(fixture.Image(config, layer))(t))
	n.Daemon = harness.StartDaemon(t, harness.WithConfig(append(lazyOptions, options...)...))
	n.needEROFS(t)
	n.Pull(t, n.image)
	n.waitIndex(t)
	n.removeImage(t)
	return n
}

func (n *lazyNode) needEROFS(t *testing.T) {
	t.Helper()
	status := harness.Get(n.Cri.Status(t.Context(), true))(t)
	if driver := status.Info["layerDriver"]; !strings.Contains(driver, "erofs") {
		t.Skip("NOT TESTED: lazy layers need EROFS layers, not ", driver)
	}
}

func (n *lazyNode) indexPath() string {
	return filepath.Join(n.Root, "images", "indexes", strings.TrimPrefix(n.blob, "sha256:"))
}

func (n *lazyNode) waitIndex(t *testing.T) {
	t.Helper()
	path := filepath.Join(n.indexPath(), "registries") // its last file
	harness.Eventually(t, "the index is written", func() error { _, err := os.Stat(path); return err })
}

func (n *lazyNode) removeImage(t *testing.T) {
	t.Helper()
	harness.Must(t, n.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: n.image}))
}

// incomplete returns the number of incomplete layers on disk.
func (n *lazyNode) incomplete(t *testing.T) (count int) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(n.Root, "images", "erofs", "lazy"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && len(e.Name()) == 64 {
			count++
		}
	}
	return count
}

// waitIncomplete waits until the layer behind the gate is the only incomplete one: that of the base
// image may be another.
func (n *lazyNode) waitIncomplete(t *testing.T) {
	t.Helper()
	harness.EventuallyGot(t, "one layer is incomplete", func() (bool, any) { left := n.incomplete(t); return left == 1, left })
}

// waitComplete waits until all layers are complete.
func (n *lazyNode) waitComplete(t *testing.T) {
	t.Helper()
	harness.EventuallyGot(t, "all layers are complete", func() (bool, any) { left := n.incomplete(t); return left == 0, left })
}

// sums is the output of sha256sum for the files, from any source of their content.
func (n *lazyNode) sums() string {
	var b strings.Builder
	for _, name := range lazyFiles {
		fmt.Fprintf(&b, "%x  /%s\n", sha256.Sum256([]byte(n.files[name])), name)
	}
	return b.String()
}

// reader is the script of a container that reads all files, and stays.
func reader() string { return "sha256sum /one /two /three /four; exec sleep 1000" }

// A pull returns before its layer is there. A container reads the right bytes once they come, and
// the layer becomes complete.
func TestLazyPull(t *testing.T) { testLazyPull(t) }

func testLazyPull(t *testing.T, options ...string) {
	t.Helper()
	n := startLazyNode(t, options...)
	n.gate.Shut()
	n.Pull(t, n.image)
	pod := n.RunPod(t)
	c := pod.Run(t, harness.Image(n.image), harness.Script(reader()))
	harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
	harness.Equal(t, "output before the content is there", c.Output(t), "")
	n.waitIncomplete(t)
	n.StateMatches(t)
	n.gate.Open()
	c.WaitOutput(t, n.sums())
	n.waitComplete(t)
	harness.Eventually(t, "the order of the reads is kept for the next pull", func() error {
		_, err := os.Stat(filepath.Join(n.indexPath(), "profile"))
		return err
	})
	// The complete layer needs no registry.
	n.gate.Refuse(true)
	again := pod.Run(t, harness.Image(n.image), harness.ContainerNamed("again"), harness.Script(reader()))
	again.WaitOutput(t, n.sums())
	n.Restart(t)
	harness.Equal(t, "sums of a container after a restart", pod.Sh(t, "sha256sum /one /two /three /four",
		harness.Image(n.image), harness.ContainerNamed("third")), n.sums())
}

// A daemon is killed while readers wait. The next one answers them.
func TestLazyReadersSurviveDaemon(t *testing.T) {
	n := startLazyNode(t)
	n.gate.Shut()
	n.Pull(t, n.image)
	pod := n.RunPod(t)
	c := pod.Run(t, harness.Image(n.image), harness.Script(reader()))
	harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
	pid := c.InitPID(t)
	n.Kill(t)
	n.Start(t)
	harness.Equal(t, "output before the content is there", c.Output(t), "")
	n.gate.Open()
	c.WaitOutput(t, n.sums())
	n.waitComplete(t)
	harness.Equal(t, "init process", c.InitPID(t), pid)
}

// Without its registry, reads of a layer fail after the limit. StopContainer works meanwhile.
func TestLazyRegistryGone(t *testing.T) {
	n := startLazyNode(t, `lazy.stall = "5s"`)
	n.gate.Shut()
	n.Pull(t, n.image)
	n.gate.Refuse(true)
	pod := n.RunPod(t)
	c := pod.Run(t, harness.Image(n.image), harness.Script("exec cat /one > /dev/null"), harness.ContainerNamed("waits"))
	c.Stop(t, 0)
	n.gate.Open() // and it refuses
	n.gate.Refuse(true)
	failing := pod.Run(t, harness.Image(n.image), harness.Script("cat /one > /dev/null; echo status $?; exec sleep 1000"),
		harness.ContainerNamed("fails"))
	failing.WaitOutput(t, "status 1")
	harness.WantText(t, "output", failing.Output(t), "Input/output error")
	status := harness.Get(n.Images.ImageStatus(t.Context(), &runtimeapi.ImageSpec{Image: n.image}, true))(t)
	harness.WantText(t, "verbose ImageStatus", status.Info["info"], `"failedReads":`, `"lastFailedRead":`)
	n.gate.Refuse(false)
	failing.Exec(t, "sh", "-c", "until cat /one > /dev/null 2>&1; do sleep 0.1; done")
	n.waitComplete(t)
	harness.Equal(t, "sum", failing.Exec(t, "sha256sum", "/one", "/two", "/three", "/four")+"\n", n.sums())
}

// CreateContainer waits for the content of the image's volumes. A stop of the pod ends the wait.
func TestLazyVolume(t *testing.T) {
	content := noise(3 << 20)
	n := startLazyNodeWith(t, v1.Config{Volumes: map[string]struct{}{"/data": {}}}, fixture.Tree{
		fixture.Dir("data", 0o755), fixture.File("data/file", 0o644, content),
	})
	n.gate.Shut()
	n.Pull(t, n.image)
	pod := n.RunPod(t)
	failed := make(chan error, 1)
	go func() {
		_, err := n.Cri.CreateContainer(t.Context(), pod.Id, pod.ContainerConfig(harness.Image(n.image)), pod.Config)
		failed <- err
	}()
	harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
	pod.Stop(t)
	harness.WantCode(t, <-failed, codes.FailedPrecondition, "pod sandbox "+pod.Id)
	n.gate.Open()
	c := n.RunPod(t).Run(t, harness.Image(n.image))
	harness.Equal(t, "sum", c.Exec(t, "sha256sum", "/data/file"), fmt.Sprintf("%x  /data/file", sha256.Sum256([]byte(content))))
}

// An index that lies costs the image, not a byte: the layer cannot be completed, and the next pull
// fetches it whole.
func TestLazyIndexLies(t *testing.T) {
	n := startLazyNode(t)
	lying := bytes.Clone(harness.Get(os.ReadFile(filepath.Join(n.indexPath(), "index")))(t))
	x := harness.Get(blobindex.Decode(lying))(t)
	x.Points[1].Out += 512 // its span and the one before have other lengths than the blob
	lying = harness.Get(x.Encode())(t)
	harness.Must(t, os.WriteFile(filepath.Join(n.indexPath(), "index"), lying, 0o600))
	n.Pull(t, n.image)
	harness.Eventually(t, "the image is removed", func() error {
		if n.ImageStatus(t, n.image) != nil {
			return errors.New("it is there")
		}
		return nil
	})
	before := n.registry.Count("GET", n.blob)
	n.Pull(t, n.image)
	harness.Equal(t, "incomplete layers after the second pull", n.incomplete(t) <= 1, true) // that of the base image
	harness.Equal(t, "the second pull fetched the blob", n.registry.Count("GET", n.blob) > before, true)
	pod := n.RunPod(t)
	harness.Equal(t, "sums", pod.Sh(t, "sha256sum /one /two /three /four", harness.Image(n.image)), n.sums())
	pod.Remove(t)
}

// An earlier version of berth has created a layer from an index of another node, and has not proven
// it. The next daemon kills the containers on it. The image is pulled again with an own index.
func TestLazyLayerOfAnotherNodesIndex(t *testing.T) {
	n := startLazyNode(t)
	n.gate.Shut()
	n.Pull(t, n.image)
	n.waitIncomplete(t)
	pod := n.RunPod(t)
	c := pod.Run(t, harness.Image(n.image), harness.Script("exec sleep 100000"))
	mounts := pod.Run(t, harness.ContainerNamed("mounts"), harness.Mount(imageVolume(n.image, "")))
	other := pod.Run(t, harness.ContainerNamed("other"))
	n.Kill(t)
	layers := harness.Get(filepath.Glob(filepath.Join(n.Root, "images", "erofs", "lazy", "*", "index")))(t)
	harness.Equal(t, "incomplete layers", len(layers), 1)
	claim := []byte(`{"peer":"192.0.2.1:4789","registry":"registry.example"}`)
	harness.Must(t, os.WriteFile(filepath.Join(filepath.Dir(layers[0]), "claim"), claim, 0o600))
	n.Start(t)
	for _, wrong := range []*harness.Container{c, mounts} {
		status := wrong.WaitExited(t)
		harness.Equal(t, "reason", status.Reason, "WrongFiles")
		harness.WantText(t, "message", status.Message, "not proven")
	}
	harness.Equal(t, "state of a container without the image", other.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	if n.ImageStatus(t, n.image) != nil {
		t.Error("the image exists")
	}
	n.gate.Open()
	n.Pull(t, n.image)
	again := pod.Run(t, harness.Image(n.image), harness.ContainerNamed("again"), harness.Script(reader()))
	again.WaitOutput(t, n.sums())
	pod.Remove(t)
	n.removeImage(t)
	// The record of the first image is kept for the operator.
	aside := filepath.Join(n.Root, "images/records", record.SetAsideDir)
	harness.Equal(t, "records set aside", len(harness.Get(os.ReadDir(aside))(t)), 1)
	harness.Must(t, os.RemoveAll(aside))
}

// A damaged index is not used.
func TestLazyIndexDamaged(t *testing.T) {
	n := startLazyNode(t)
	path := filepath.Join(n.indexPath(), "index")
	damaged := harness.Get(os.ReadFile(path))(t)
	damaged[len(damaged)/2] ^= 1
	harness.Must(t, os.WriteFile(path, damaged, 0o600))
	n.gate.Shut() // a lazy layer would stay incomplete
	n.Pull(t, n.image)
	pod := n.RunPod(t)
	harness.Equal(t, "sums", pod.Sh(t, "sha256sum /one /two /three /four", harness.Image(n.image)), n.sums())
	pod.Remove(t)
	n.gate.Open()
}

// Daemons are killed again and again while layers are filled and read. Every byte of every file is
// compared.
func TestLazyKills(t *testing.T) {
	kills := 10
	if testutil.AllTests() {
		kills = 200
	}
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	n := startLazyNode(t)
	done := 0
	for done < kills {
		done += n.killRound(t, random)
	}
	t.Logf("%d daemons were killed", done)
}

// killRound pulls the image, starts containers that read it, and kills daemons until the layer is
// complete. It returns how many were killed.
func (n *lazyNode) killRound(t *testing.T, random *rand.Rand) (kills int) {
	t.Helper()
	n.gate.Shut()
	n.Pull(t, n.image)
	pod := n.RunPod(t)
	var readers []*harness.Container
	for i := range 3 {
		order := slices.Clone(lazyFiles)
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		script := "for f in " + strings.Join(order, " ") + "; do sha256sum /$f; done > /sums; cd /; sort -k 2 sums; echo end; exec sleep 1000"
		readers = append(readers, pod.Run(t, harness.Image(n.image), harness.ContainerNamed(fmt.Sprint("reader", i)), harness.Script(script)))
	}
	const lives = 12
	for life := 1; n.incomplete(t) > 0 && life <= lives; life++ {
		n.gate.Let(random.IntN(3))
		time.Sleep(time.Duration(random.IntN(40)) * time.Millisecond) // until the kill
		n.Kill(t)
		kills++
		n.Start(t)
	}
	n.gate.Open()
	for _, c := range readers {
		c.WaitOutput(t, "end")
		harness.Equal(t, "output", c.Output(t), n.sorted()+"end\n")
	}
	n.waitComplete(t)
	pod.Remove(t)
	n.removeImage(t)
	return kills
}

// sorted is sums in the order of the names.
func (n *lazyNode) sorted() string {
	list := slices.Collect(strings.Lines(n.sums()))
	slices.SortFunc(list, func(a, b string) int { return strings.Compare(a[66:], b[66:]) })
	return strings.Join(list, "")
}

// An image is removed while a container uses its incomplete layer.
func TestLazyImageRemovedWhileInUse(t *testing.T) {
	n := startLazyNode(t)
	n.gate.Shut()
	n.Pull(t, n.image)
	pod := n.RunPod(t)
	c := pod.Run(t, harness.Image(n.image), harness.Script(reader()))
	harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
	n.removeImage(t)
	n.waitIncomplete(t)
	n.gate.Open()
	c.WaitOutput(t, n.sums())
	n.waitComplete(t)
	pod.Remove(t)
}
