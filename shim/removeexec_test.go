package shim

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// If the remains of an exec cannot be removed for lack of descriptors, they are removed when
// descriptors are free again.
func TestExecRemovalIsRetried(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, proto.ExecName("e"))
	if err := errors.Join(os.Mkdir(left, 0o700), os.WriteFile(filepath.Join(left, "file"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &old); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		l := &Launchers{cfg: Config{Log: slog.New(slog.DiscardHandler)}, ctx: t.Context()}
		if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Max: old.Max}, nil); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			l.removeExecRemains(&proto.Exec{ExecID: "e", Dir: dir, Runtime: &ociruntime.Runtime{}})
		}()
		synctest.Wait()
		if err := unix.Prlimit(0, unix.RLIMIT_NOFILE, &old, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(left); err != nil {
			t.Errorf("the exec's directory was removed while no descriptor was free: %v", err)
		}
		<-done
	})
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the exec's directory was not removed: %v", err)
	}
}
