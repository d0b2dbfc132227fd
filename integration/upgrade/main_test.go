package upgrade

import (
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

func TestMain(m *testing.M) { harness.Main(m) }

func released(t *testing.T) (versions []string) {
	t.Helper()
	for _, line := range machine.ReadLines("versions") {
		if version, _, ok := strings.Cut(line, " "); ok && version != "#" {
			versions = append(versions, version)
		}
	}
	if len(versions) == 0 {
		t.Fatal("the file versions lists no version")
	}
	return versions
}

// programs returns the directory of a version's programs. It skips the test if they cannot be
// built.
func programs(t *testing.T, version string) string {
	t.Helper()
	testutil.Long(t) // contrib/test -all builds the released versions
	return harness.Release(t, version)
}
