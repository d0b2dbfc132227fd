package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// critestEnv names the program critest, whose module cannot be fetched from every proxy.
const critestEnv = "BERTH_CRITEST"

// critest's specs of SELinux pass. The specs skip themselves on a machine without SELinux.
func TestSELinuxCritest(t *testing.T) {
	machine.NeedSELinux(t)
	critest := os.Getenv(critestEnv)
	if critest == "" {
		t.Skipf("NOT TESTED: %s is not set", critestEnv)
	}
	d := harness.StartDaemon(t)
	d.Tolerate(`comm="top"`) // which looks at processes of the pod with other categories
	image, _ := harness.Push(t, harness.Registry, "critest:latest", harness.BuildImage(t, v1.Config{}))
	images := filepath.Join(t.TempDir(), "images.yaml")
	harness.Must(t, os.WriteFile(images, fmt.Appendf(nil, "defaultTestContainerImage: %q\n", image), 0o600))
	socket := "unix://" + d.Socket
	out, err := exec.CommandContext(t.Context(), critest, "-runtime-endpoint", socket, "-image-endpoint", socket,
		"-test-images-file", images, "-ginkgo.focus", "SELinux", "-ginkgo.v", "-ginkgo.no-color").CombinedOutput()
	t.Logf("%s", out)
	harness.Must(t, err)
	harness.WantText(t, "critest's output", string(out), "Ran 17 of ")
}
