package crash

import (
	"fmt"
	"os"
	"testing"

	"berth/integration/harness"
)

// TestMain is also an NRI plugin, which the daemon starts.
func TestMain(m *testing.M) {
	if !isPlugin() {
		harness.MainWithFailpoints(m)
	}
	if err := runPlugin(); err != nil {
		fmt.Fprintln(os.Stderr, "plugin:", err)
		os.Exit(1)
	}
}
