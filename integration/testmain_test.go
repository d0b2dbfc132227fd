package integration

import (
	"fmt"
	"os"
	"testing"

	"berth/integration/harness"
)

// TestMain is also an NRI plugin: the daemon starts this program as one of its directory.
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
