package integration

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/peers/peerstest"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/internal/testutil"
)

// peersConfig are the options of a node with a certificate of ca.
func peersConfig(ca *peerstest.CA, addresses []string, i int) string {
	cert, key := ca.Node()
	return fmt.Sprintf("peers.listen = %q\npeers.advertise = %q\npeers.seeds = [\"%s\"]\npeers.cert = %q\npeers.key = %q\npeers.ca = %q",
		addresses[i], addresses[i], strings.Join(addresses, `", "`), cert, key, ca.File)
}

// Of two nodes that pull an image, one fetches its layer from the registry and sends it to the
// other. The container sees the same files.
func TestPeersShareLayers(t *testing.T) {
	r := harness.NewRegistry(t)
	content := noise(3 << 20)
	shared := harness.PackLayer(t, fixture.Tree{fixture.File("shared", 0o644, content)}, fixture.Gzip)
	image := harness.Get(fixture.ImageOf(v1.Config{}, shared))(t)
	name, _ := harness.Push(t, r, "shared:latest", image)
	ca, addresses := peerstest.NewCA(t), peerstest.Addresses(t, 2)
	first := harness.StartDaemon(t, harness.WithConfig(peersConfig(ca, addresses, 0)))
	second := harness.StartDaemon(t, harness.WithConfig(peersConfig(ca, addresses, 1)))
	first.Pull(t, name)
	id := second.Pull(t, name)
	harness.Equal(t, "downloads of the shared layer", r.Count(http.MethodGet, harness.DigestOf(t, shared)), 1)

	pod := second.RunPod(t)
	c := pod.Run(t, harness.Script("exec sleep 1000"), harness.Mount(imageVolume(id, "")))
	harness.Equal(t, "size of the shared file", c.Exec(t, "stat", "-c", "%s", "/v/shared"), strconv.Itoa(len(content)))

	// Without the other node, the layer comes from the registry.
	first.Stop(t)
	pod.Remove(t)
	harness.Must(t, second.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	second.Pull(t, name)
	harness.Equal(t, "downloads of the shared layer", r.Count(http.MethodGet, harness.DigestOf(t, shared)), 2)
	first.Start(t) // for the leak check
}

// Ten nodes that pull an image at the same time move it from the registry at most 1.2 times.
func TestTenNodesShareLayers(t *testing.T) {
	testutil.Long(t)
	const nodes, count = 10, 10
	r := harness.NewRegistry(t)
	var layers []v1.Layer
	var script []string
	want := ""
	for i := range count {
		name, content := fmt.Sprint("file", i), noise(2<<20+i)
		layers = append(layers, harness.PackLayer(t, fixture.Tree{fixture.File(name, 0o644, content)}, fixture.Gzip))
		script = append(script, "/v/"+name)
		want += fmt.Sprintf("%x  /v/%s\n", sha256.Sum256([]byte(content)), name)
	}
	name, _ := harness.Push(t, r, "shared:latest", harness.Get(fixture.ImageOf(v1.Config{}, layers...))(t))
	ca, addresses := peerstest.NewCA(t), peerstest.Addresses(t, nodes)
	var daemons []*harness.Daemon
	for i := range nodes {
		daemons = append(daemons, harness.StartDaemon(t, harness.WithConfig(peersConfig(ca, addresses, i))))
	}
	var group errgroup.Group
	for _, d := range daemons {
		group.Go(func() error {
			_, err := d.Images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: name}, nil, nil)
			return err
		})
	}
	harness.Must(t, group.Wait())
	downloads := 0
	for _, l := range layers {
		downloads += r.Count(http.MethodGet, harness.DigestOf(t, l))
	}
	t.Logf("%d nodes requested %d layers of an image with %d from the registry", nodes, downloads, count)
	if downloads > count*12/10 {
		t.Errorf("the registry sent %d layers", downloads)
	}
	for _, d := range daemons {
		pod := d.RunPod(t)
		c := pod.Run(t, harness.Script("exec sleep 1000"), harness.Mount(imageVolume(name, "")))
		harness.Equal(t, "files", c.Exec(t, append([]string{"sha256sum"}, script...)...)+"\n", want)
		pod.Remove(t)
	}
}
