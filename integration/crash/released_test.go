package crash

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/internal/failpoint/points"
)

// Released binaries contain neither the names of failpoints nor the code for them.
func TestReleasedBinariesHaveNoFailpoints(t *testing.T) {
	all := harness.Get(points.Below("../.."))(t)
	traces := []string{"BERTH_FAILPOINTS"}
	for _, p := range all {
		if strings.Contains(p.Name, "-") { // shorter names may be parts of function names
			traces = append(traces, p.Name)
		}
	}
	released, with := programs(t, harness.ReleasedBinaries()), programs(t, harness.BinDir)
	for _, name := range traces {
		if bytes.Contains(released, []byte(name)) {
			t.Errorf("a released binary contains %q", name)
		}
		if !bytes.Contains(with, []byte(name)) {
			t.Errorf("no binary with failpoints contains %q, so this test would not find it", name)
		}
	}
}

// programs returns the concatenated content of the programs in a directory.
func programs(t *testing.T, dir string) (all []byte) {
	t.Helper()
	for _, name := range []string{"berth", "berth-shim", "berth-unpack"} {
		content := harness.Get(os.ReadFile(filepath.Join(dir, name)))(t)
		all = append(all, content...)
	}
	return all
}
