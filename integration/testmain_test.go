package integration

import (
	"fmt"
	"os"
	"testing"

	"berth/integration/harness"
)

// The daemon also starts this program as an NRI plugin from its plugin directory.
func TestMain(m *testing.M) {
	if !isInstalledPlugin() {
		harness.OnDisk()
		harness.Main(m)
	}
	if err := runInstalledPlugin(); err != nil {
		fmt.Fprintln(os.Stderr, "plugin:", err)
		os.Exit(1)
	}
}
