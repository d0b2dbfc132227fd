// Package testenv skips tests that the current environment cannot run, each with a reason that
// contrib/test lists in its summary. Only test code imports it.
package testenv

import (
	"fmt"
	"os"
	"testing"
)

const (
	// machineVar names the cgroup below which a test may create its own. contrib/machine sets it.
	machineVar = "BERTH_MACHINE"
	// allVar selects the complete test suite. `contrib/test -all` sets it.
	allVar = "BERTH_TEST_ALL"

	rootHint = "needs root: sudo ./contrib/test, or go test -exec $PWD/contrib/machine"
)

// NeedRoot skips the test unless it runs as root.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip(rootHint)
	}
}

// MainNeedsRoot ends a test binary whose TestMain needs root. The binary passes, and says that it
// ran no test.
func MainNeedsRoot() {
	if os.Geteuid() != 0 {
		fmt.Println("--- SKIP: all tests of this package\n    " + rootHint)
		os.Exit(0)
	}
}

// NeedMachine skips the test unless it runs as root below contrib/machine, with its own namespaces
// and cgroups. It returns the name of the cgroup below which the test may create others.
func NeedMachine(t testing.TB) string {
	t.Helper()
	NeedRoot(t)
	machine := os.Getenv(machineVar)
	if machine == "" {
		t.Skip("needs a machine of its own: go test -exec $PWD/contrib/machine")
	}
	return machine
}

// Long skips a test that only the complete suite runs, because it takes long and a shorter test
// covers the common case.
func Long(t testing.TB) {
	t.Helper()
	if !All() {
		t.Skip("long: " + allVar + "=1 or contrib/test -all")
	}
}

// All reports whether the complete suite was asked for. Tests that enumerate cases run a selection
// of them otherwise, and log how many they left out.
func All() bool { return os.Getenv(allVar) == "1" }
