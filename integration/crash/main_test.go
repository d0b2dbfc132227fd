package crash

import (
	"testing"

	"berth/integration/harness"
)

func TestMain(m *testing.M) { harness.MainWithFailpoints(m) }
