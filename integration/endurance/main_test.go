package endurance

import (
	"testing"

	"berth/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
