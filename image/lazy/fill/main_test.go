package fill

import (
	"os"
	"testing"

	"berth/internal/testutil"
)

func TestMain(m *testing.M) {
	if order := os.Getenv(daemonVar); order != "" {
		os.Exit(runDaemon(order))
	}
	os.Exit(testutil.MainInMountNamespace(m))
}
