package crash

import (
	"fmt"
	"os"
	"testing"

	"berth/integration/harness"
)

// The daemon also starts this program as an NRI plugin.
func TestMain(m *testing.M) {
	if !isPlugin() {
		harness.MainWithFailpoints(m)
	}
	if err := runPlugin(); err != nil {
		fmt.Fprintln(os.Stderr, "plugin:", err)
		os.Exit(1)
	}
}
