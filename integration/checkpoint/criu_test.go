package checkpoint

import (
	"fmt"
	"os"
	"testing"

	"berth/integration/harness"
)

// criuOption returns an option that makes a daemon use CRIU. It skips the test if there is none.
func criuOption(t *testing.T) harness.DaemonOption {
	t.Helper()
	path := os.Getenv("BERTH_TEST_CRIU")
	if path == "" {
		t.Skip("NOT TESTED: no CRIU (BERTH_TEST_CRIU)")
	}
	return harness.WithConfig(fmt.Sprintf("checkpoint.criu = %q", path))
}
