package integration

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	blobindex "berth/image/lazy/index"
	"berth/image/peers/peerstest"
	"berth/image/tree"
	"berth/integration/fixture"
	"berth/integration/harness"
)

// peerPair are two nodes. The first has pulled an image whole. The second is lazy with indexes of
// the first.
type peerPair struct {
	first, second *lazyNode
	address       string // of the first
}

func startPeerPair(t *testing.T) *peerPair {
	t.Helper()
	n := lazyNode{registry: harness.NewRegistry(t), files: map[string]string{}}
	var tree fixture.Tree
	for i, name := range lazyFiles {
		n.files[name] = noise(4<<20 + i*1000)
		tree = append(tree, fixture.File(name, 0o644, n.files[name]))
	}
	layer := harness.PackLayer(t, tree, fixture.Gzip)
	n.blob = harness.DigestOf(t, layer)
	n.gate = fixture.NewGate(n.blob)
	n.registry.Hook(n.gate.Hook)
	n.image, _ = harness.Push(t, n.registry, "lazy:latest", harness.Get(fixture.Image(v1.Config{}, layer))(t))
	ca, addresses := peerstest.NewCA(t), peerstest.Addresses(t, 2)
	first, second := n, n
	first.Daemon = harness.StartDaemon(t, harness.WithConfig("lazy.index_bytes = 268435456", peersConfig(ca, addresses, 0)))
	first.needEROFS(t)
	second.Daemon = harness.StartDaemon(t, harness.WithConfig(`lazy.policy = "all"`, "lazy.min_bytes = 1", `lazy.min_time = "0s"`, peersConfig(ca, addresses, 1)))
	first.Pull(t, n.image)
	first.waitIndex(t)
	return &peerPair{&first, &second, addresses[0]}
}

// pullLazily pulls the image on the second node, while the content does not come.
func (p *peerPair) pullLazily(t *testing.T) {
	t.Helper()
	p.second.gate.Shut()
	p.second.Pull(t, p.second.image)
	p.second.waitIncomplete(t)
	status := harness.Get(p.second.Images.ImageStatus(t.Context(), &runtimeapi.ImageSpec{Image: p.second.image}, true))(t)
	harness.WantText(t, "verbose status", fmt.Sprint(status.Info), `"unproven":"`+p.address)
	harness.Equal(t, "the index is kept before it is proven", p.second.hasIndex(t), false)
}

func (n *lazyNode) hasIndex(t *testing.T) bool {
	t.Helper()
	_, err := os.Stat(n.indexPath())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

// The second node that pulls an ordinary image starts it lazily. Its daemon is killed while the
// layer is filled; the next one proves the index.
func TestLazyOnSecondNode(t *testing.T) {
	for name, killed := range map[string]bool{"same daemon": false, "daemon killed": true} {
		t.Run(name, func(t *testing.T) {
			p := startPeerPair(t)
			n := p.second
			p.pullLazily(t)
			pod := n.RunPod(t)
			c := pod.Run(t, harness.Image(n.image), harness.Script(reader()))
			harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
			harness.Equal(t, "output before the content is there", c.Output(t), "")
			n.StateMatches(t)
			if killed {
				n.gate.Let(2)
				n.Kill(t)
				n.Start(t)
				harness.Equal(t, "the index is kept before it is proven", n.hasIndex(t), false)
			}
			n.gate.Open()
			c.WaitOutput(t, n.sums())
			n.waitComplete(t)
			n.waitIndex(t) // it is proven
			harness.Equal(t, "digest of the proven index's tree", n.treeDigest(t), p.first.treeDigest(t))
			n.StateMatches(t)
			pod.Remove(t)
			n.removeImage(t)
		})
	}
}

// treeDigest returns the digest of the tree of the node's index.
func (n *lazyNode) treeDigest(t *testing.T) digest.Digest {
	t.Helper()
	return harness.Get(blobindex.Decode(harness.Get(os.ReadFile(filepath.Join(n.indexPath(), "index")))(t)))(t).TreeDigest
}

// swapFiles makes the node's index show the content of the file two in the place of the file one.
// Everything in the index is consistent.
func (n *lazyNode) swapFiles(t *testing.T) {
	t.Helper()
	read := func(name string) []byte { return harness.Get(os.ReadFile(filepath.Join(n.indexPath(), name)))(t) }
	root, _, err := tree.Decode(bytes.NewReader(read("tree")), 0, tree.Limit{Bytes: 1 << 20, Memory: 1 << 20, Blocks: 1 << 20})
	harness.Must(t, err)
	one, two := root.Children["one"], root.Children["two"]
	one.Data, two.Data = two.Data, one.Data
	var changed bytes.Buffer
	harness.Must(t, tree.Encode(&changed, root))
	x := harness.Get(blobindex.Decode(bytes.Clone(read("index"))))(t)
	x.TreeDigest = digest.FromBytes(changed.Bytes())
	for name, content := range map[string][]byte{"tree": changed.Bytes(), "index": harness.Get(x.Encode())(t)} {
		path := filepath.Join(n.indexPath(), name)
		harness.Must(t, os.Remove(path)) // the tree is a link to that of the layer
		harness.Must(t, os.WriteFile(path, content, 0o600))
	}
}

// A node whose index lies about the files is found out when the layer is there, also by the next
// daemon. The container is killed and its status says why. The next pull gets the right files.
func TestLazyPeerLies(t *testing.T) {
	for name, killed := range map[string]bool{"same daemon": false, "daemon killed": true} {
		t.Run(name, func(t *testing.T) {
			p := startPeerPair(t)
			n := p.second
			p.first.swapFiles(t)
			p.pullLazily(t)
			pod := n.RunPod(t)
			c := pod.Run(t, harness.Image(n.image), harness.Script(reader()))
			harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
			if killed {
				n.Kill(t)
				n.Start(t)
			}
			n.gate.Open()
			status := c.WaitExited(t)
			harness.Equal(t, "reason", status.Reason, "WrongFiles")
			harness.WantText(t, "message", status.Message, p.address)
			if strings.Contains(c.Output(t), n.sums()) {
				t.Error("the container has read the right files: the test shows nothing")
			}
			harness.WantText(t, "log", string(harness.Get(os.ReadFile(n.LogFile()))(t)), "another node has sent a wrong index")
			harness.Eventually(t, "the image is removed", func() error {
				if n.ImageStatus(t, n.image) != nil {
					return errors.New("it is there")
				}
				return nil
			})
			harness.Equal(t, "the wrong index is kept", n.hasIndex(t), false)
			n.Pull(t, n.image)
			again := pod.Run(t, harness.Image(n.image), harness.ContainerNamed("again"), harness.Script(reader()))
			again.WaitOutput(t, n.sums())
			pod.Remove(t)
			n.removeImage(t)
		})
	}
}

// A container of another image that only mounts the image as a volume is killed, too.
func TestLazyPeerLiesAboutImageVolume(t *testing.T) {
	for name, killed := range map[string]bool{"same daemon": false, "daemon killed": true} {
		t.Run(name, func(t *testing.T) {
			p := startPeerPair(t)
			n := p.second
			p.first.swapFiles(t)
			p.pullLazily(t)
			pod := n.RunPod(t)
			c := pod.Run(t, harness.Mount(imageVolume(n.image, "")))
			other := pod.Run(t, harness.ContainerNamed("other"))
			if killed {
				n.Kill(t)
				n.Start(t)
			}
			n.gate.Open()
			status := c.WaitExited(t)
			harness.Equal(t, "reason", status.Reason, "WrongFiles")
			harness.WantText(t, "message", status.Message, p.address)
			harness.Equal(t, "state of a container without the image", other.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
			pod.Remove(t)
			n.removeImage(t)
		})
	}
}

// A layer that is damaged before its index is proven ends at the next start of the daemon, with its
// containers.
func TestLazyPeersLayerIsDamaged(t *testing.T) {
	p := startPeerPair(t)
	n := p.second
	p.pullLazily(t)
	pod := n.RunPod(t)
	c := pod.Run(t, harness.Image(n.image), harness.Script("exec sleep 100000"))
	n.Kill(t)
	damaged := harness.Get(filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(n.indexPath())), "erofs", "lazy", "*", "index")))(t)
	harness.Equal(t, "incomplete layers", len(damaged), 1)
	harness.Must(t, os.Truncate(damaged[0], 3))
	n.Start(t)
	status := c.WaitExited(t)
	harness.Equal(t, "reason", status.Reason, "WrongFiles")
	harness.WantText(t, "message", status.Message, p.address)
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
