package integration

import (
	"fmt"
	"os"
	"testing"

	"berth/integration/harness"
	"berth/integration/kata"
)

// The daemon also starts this program as an NRI plugin from its plugin directory, and a test as
// Kata's hypervisor.
func TestMain(m *testing.M) {
	if dir := os.Getenv(kataGuestEnv); dir != "" {
		fmt.Fprintln(os.Stderr, "hypervisor:", kata.Serve(dir, os.Getenv(kataRuncEnv)))
		os.Exit(1)
	}
	if !isInstalledPlugin() {
		harness.OnDisk()
		harness.Main(m)
	}
	if err := runInstalledPlugin(); err != nil {
		fmt.Fprintln(os.Stderr, "plugin:", err)
		os.Exit(1)
	}
}
