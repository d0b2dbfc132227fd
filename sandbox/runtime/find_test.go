package runtime

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// A living shim that cannot be inspected must not count as a launcher, because a launcher would be
// killed.
func TestIsLauncher(t *testing.T) {
	cmd, shim := startProcess(t, "sleep", "1000")
	defer shim.Close()
	defer func(read func(int) (string, error)) { readExe = read }(readExe)
	inspect := func(exe string, err error) (bool, error) {
		readExe = func(int) (string, error) { return exe, err }
		return isLauncher(cmd.Process.Pid, shim)
	}
	for exe, want := range map[string]bool{"/memfd:berth-shim (deleted)": true, "/var/lib/berth/bin/monitor": false} {
		if got, err := inspect(exe, nil); got != want || err != nil {
			t.Errorf("%s: %t, %v", exe, got, err)
		}
	}
	for _, failure := range []error{unix.ENOMEM, unix.EACCES} {
		if launcher, err := inspect("", failure); launcher || !errors.Is(err, failure) {
			t.Errorf("%v: %t, %v", failure, launcher, err)
		}
	}
	if launcher, err := inspect("", unix.ENOENT); !launcher || err != nil {
		t.Errorf("exiting shim: %t, %v", launcher, err)
	}
	testutil.Must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	if launcher, err := inspect("", unix.EACCES); !launcher || err != nil {
		t.Errorf("exited shim: %t, %v", launcher, err)
	}
}
