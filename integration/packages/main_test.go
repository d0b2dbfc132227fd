package packages

import (
	"os"
	"testing"

	"berth/integration/harness"
)

// packagesEnv names the directory of the packages: old and new hold one version each.
const packagesEnv = "BERTH_PACKAGES"

// kubernetesEnv names the directory of kubelet, see integration/kubelet/build.
const kubernetesEnv = "BERTH_KUBERNETES"

func TestMain(m *testing.M) {
	if os.Getenv(packagesEnv) == "" {
		os.Exit(m.Run())
	}
	harness.Main(m)
}
