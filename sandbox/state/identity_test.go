package state

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// A daemon in a chroot may not see the mount of root. It starts nevertheless.
func TestIdentifyWithoutVisibleMount(t *testing.T) {
	testutil.NeedRoot(t)
	dir := t.TempDir()
	for _, name := range []string{"root", "state"} {
		testutil.Must(t, os.Mkdir(filepath.Join(dir, name), 0o700))
	}
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Chroot(dir)
		}
		if err == nil {
			err = Dirs{Root: "/root", State: "/state"}.Identify()
		}
		failed <- err
	}()
	testutil.Must(t, <-failed)
	known, err := ReadIdentity(filepath.Join(dir, "state"))
	testutil.Must(t, err)
	if own, err := ReadIdentity(filepath.Join(dir, "root")); err != nil || own.ID == "" || own.ID != known.ID || known.Root != "/root" {
		t.Errorf("root %+v, state %+v: %v", own, known, err)
	}
}
