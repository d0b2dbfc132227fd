package harness

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Release returns the directory of a released version's programs, which it builds if they are not
// there. It skips the test if this checkout does not have the version.
func Release(t *testing.T, version string) (bin string) {
	t.Helper()
	build := exec.CommandContext(t.Context(), filepath.Join(source(), "integration/upgrade/build"), version)
	build.Stderr = os.Stderr
	out, err := build.Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 77 {
		t.Skipf("NOT TESTED: upgrade from %s: this checkout has no history to build it from", version)
	}
	Must(t, err)
	return strings.TrimSpace(string(out))
}
