package runtime

import (
	"errors"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"

	"berth/internal/testutil"
)

// A living shim that cannot be inspected is not taken for a launcher, which would be killed.
func TestIsLauncher(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	testutil.Must(t, cmd.Start())
	shim, err := pidfd.Open(cmd.Process.Pid)
	testutil.Must(t, err)
	defer shim.Close()
	defer func(read func(int) (string, error)) { readExe = read }(readExe)
	look := func(exe string, err error) (bool, error) {
		readExe = func(int) (string, error) { return exe, err }
		return isLauncher(cmd.Process.Pid, shim)
	}
	for exe, want := range map[string]bool{"/memfd:berth-shim (deleted)": true, "/var/lib/berth/bin/monitor": false} {
		if got, err := look(exe, nil); got != want || err != nil {
			t.Errorf("%s: %t, %v", exe, got, err)
		}
	}
	for _, trouble := range []error{unix.ENOMEM, unix.EACCES} {
		if launcher, err := look("", trouble); launcher || !errors.Is(err, trouble) {
			t.Errorf("%v: %t, %v", trouble, launcher, err)
		}
	}
	if launcher, err := look("", unix.ENOENT); !launcher || err != nil {
		t.Errorf("one that ends: %t, %v", launcher, err)
	}
	testutil.Must(t, cmd.Process.Kill())
	_ = cmd.Wait() // it was killed
	if launcher, err := look("", unix.EACCES); !launcher || err != nil {
		t.Errorf("one that has ended: %t, %v", launcher, err)
	}
}
