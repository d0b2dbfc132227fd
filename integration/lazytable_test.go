package integration

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/lazy/toc/toctest"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/internal/testutil"
)

var tableForms = map[string]func([]byte, toctest.Options) (*toctest.Blob, error){
	"eStargz": toctest.Stargz, "zstd:chunked": toctest.Chunked, "SOCI": toctest.Soci,
}

// startTableNode starts a daemon that has never seen its image. The layer has a table of contents.
func startTableNode(t *testing.T, form string, lie func(*estargz.JTOC)) *lazyNode {
	t.Helper()
	n := &lazyNode{registry: harness.NewRegistry(t), files: map[string]string{}}
	var tree fixture.Tree
	for i, name := range lazyFiles {
		n.files[name] = noise(4<<20 + i*1000)
		tree = append(tree, fixture.File(name, 0o644, n.files[name]))
	}
	o := toctest.Options{ChunkSize: 1 << 20, Lie: lie} // the last part is small: pulls by eStargz fetch it
	if form == "SOCI" {
		o.ChunkSize = 900_000 // no part is small: pullByTable lets one of them pass
	}
	layer := harness.Get(tree.TableLayer(tableForms[form], o))(t)
	n.blob = harness.DigestOf(t, layer)
	n.gate = fixture.NewGate(n.blob)
	n.registry.Hook(n.gate.Hook)
	img, soci, err := fixture.WithTable(harness.Get(fixture.Image(v1.Config{}, layer))(t), layer)
	harness.Must(t, err)
	if soci != nil {
		harness.Push(t, n.registry, "lazy:soci", soci)
		n.proofs = 1
	}
	n.image, _ = harness.Push(t, n.registry, "lazy:latest", img)
	n.Daemon = harness.StartDaemon(t, harness.WithConfig(`lazy.policy = "on"`, "lazy.min_bytes = 1", `lazy.min_time = "0s"`))
	n.needEROFS(t)
	return n
}

// pullByTable pulls the image while its content does not come.
func (n *lazyNode) pullByTable(t *testing.T) {
	t.Helper()
	n.gate.Shut()
	n.gate.Let(n.proofs)
	n.Pull(t, n.image)
	n.waitIncomplete(t)
	status := harness.Get(n.Images.ImageStatus(t.Context(), &runtimeapi.ImageSpec{Image: n.image}, true))(t)
	harness.WantText(t, "verbose status", fmt.Sprint(status.Info), `"unproven":"table of contents`)
}

// The first node that pulls an image with a table of contents starts it lazily. Its daemon is
// killed while the layer is filled; the next one proves the table.
func TestLazyOnFirstNode(t *testing.T) {
	for form := range tableForms {
		for name, killed := range map[string]bool{"same daemon": false, "daemon killed": true} {
			t.Run(form+", "+name, func(t *testing.T) {
				n := startTableNode(t, form, nil)
				n.pullByTable(t)
				pod := n.RunPod(t)
				c := pod.Run(t, harness.Image(n.image), harness.Script(reader()))
				harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
				harness.Equal(t, "output before the content is there", c.Output(t), "")
				n.StateMatches(t)
				if killed {
					n.gate.Let(2)
					n.Kill(t)
					n.Start(t)
				}
				n.gate.Open()
				c.WaitOutput(t, n.sums())
				n.waitComplete(t)
				n.StateMatches(t)
				n.gate.Refuse(true) // the complete layer needs no registry
				again := pod.Run(t, harness.Image(n.image), harness.ContainerNamed("again"), harness.Script(reader()))
				again.WaitOutput(t, n.sums())
				pod.Remove(t)
				n.removeImage(t)
			})
		}
	}
}

// A table of contents that lies is found when the layer is there. The container is killed and its
// status says why. The next pull gets the right files.
func TestLazyTableLies(t *testing.T) {
	for form := range tableForms {
		t.Run(form, func(t *testing.T) {
			n := startTableNode(t, form, func(x *estargz.JTOC) { x.Entries[0].Mode = 0o4755 })
			n.pullByTable(t)
			pod := n.RunPod(t)
			c := pod.Run(t, harness.Image(n.image), harness.Script(reader()))
			harness.EventuallyTrue(t, "a request for content waits", func() bool { return n.gate.Waiting() > 0 })
			n.gate.Open()
			status := c.WaitExited(t)
			harness.Equal(t, "reason", status.Reason, "WrongFiles")
			harness.WantText(t, "message", status.Message, "table of contents")
			harness.WantText(t, "log", string(harness.Get(os.ReadFile(n.LogFile()))(t)), "does not describe the layer")
			harness.Eventually(t, "the image is removed", func() error {
				if n.ImageStatus(t, n.image) != nil {
					return errors.New("it is there")
				}
				return nil
			})
			n.Pull(t, n.image)
			harness.Equal(t, "mode", pod.Sh(t, "stat -c %a /one", harness.Image(n.image), harness.ContainerNamed("again")), "644\n")
			pod.Remove(t)
			n.removeImage(t)
		})
	}
}

// Daemons are killed again and again while a layer with a table of contents is filled, read and
// proven. Every byte of every file is compared.
func TestLazyTableKills(t *testing.T) {
	kills := 5
	if testutil.AllTests() {
		kills = 60
	}
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	n := startTableNode(t, "eStargz", nil)
	for done := 0; done < kills; {
		done += n.killRound(t, random)
	}
}
