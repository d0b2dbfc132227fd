package checkpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// programsEnv names a directory with the compiled programs of testdata. If unset, the tests compile
// them.
const programsEnv = "BERTH_TEST_PROGRAMS"

// program returns the path of the static program testdata/NAME.c. It skips the test without a
// compiler.
func program(t *testing.T, name string) string {
	t.Helper()
	if dir := os.Getenv(programsEnv); dir != "" {
		return filepath.Join(dir, name)
	}
	path := filepath.Join(t.TempDir(), name)
	out, err := exec.Command("cc", "-O2", "-static", "-pthread", "-o", path, "testdata/"+name+".c").CombinedOutput()
	if err != nil {
		t.Skipf("NOT TESTED: no C compiler with a static C library: %v\n%s", err, out)
	}
	return path
}
