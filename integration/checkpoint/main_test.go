// Package checkpoint tests checkpoint and restore with the real daemon and CRIU.
package checkpoint

import (
	"testing"

	"berth/integration/harness"
)

func TestMain(m *testing.M) {
	harness.OnDisk()
	harness.MainWithFailpoints(m)
}
