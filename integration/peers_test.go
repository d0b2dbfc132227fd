package integration

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/peers/peerstest"
	"berth/integration/fixture"
	"berth/integration/harness"
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
