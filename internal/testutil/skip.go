package testutil

import (
	"fmt"
	"os"
	"testing"
)

const (
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

// MainNeedsRoot ends a test binary whose TestMain needs root. The test binary then exits with
// success, and prints that it ran no test.
func MainNeedsRoot() {
	if os.Geteuid() != 0 {
		fmt.Println("--- SKIP: all tests of this package\n    " + rootHint)
		os.Exit(0)
	}
}

// Long skips a test that only the complete suite runs, because it takes long and a shorter test
// covers the common case.
func Long(t testing.TB) {
	t.Helper()
	if !AllTests() {
		t.Skip("long: " + allVar + "=1 or contrib/test -all")
	}
}

// AllTests reports whether the complete suite runs. Otherwise tests that enumerate cases run a
// selection of the cases, and log how many they have left out.
func AllTests() bool { return os.Getenv(allVar) == "1" }
