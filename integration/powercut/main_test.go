package powercut

import (
	"testing"

	"berth/integration/harness"
)

func TestMain(m *testing.M) {
	harness.OnDisk()
	harness.Main(m)
}
