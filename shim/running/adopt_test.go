package running

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/internal/testutil"
	"berth/shim/proto"
)

// endedProcess returns the pidfd of a process that has ended.
func endedProcess(t *testing.T) *os.File {
	t.Helper()
	cmd := exec.Command("true")
	testutil.Must(t, cmd.Start())
	process, err := pidfd.Open(cmd.Process.Pid)
	testutil.Must(t, err)
	testutil.Must(t, cmd.Wait())
	return process
}

// What an adopted exec has left is removed later if it cannot be removed at once.
func TestAdoptedRemovalIsRetried(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	testutil.Must(t, os.WriteFile(dir, nil, 0o600)) // no directory, so the removal fails
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.Must(t, err)
	testutil.Must(t, unix.Close(fds[1])) // the launcher has ended
	conn, err := proto.NewConn(os.NewFile(uintptr(fds[0]), "launcher"))
	testutil.Must(t, err)
	process, launcher := endedProcess(t), endedProcess(t)
	synctest.Test(t, func(t *testing.T) {
		removed := make(chan struct{})
		spawn := func(f func()) bool {
			go func() { defer close(removed); f() }()
			return true
		}
		log := slog.New(slog.DiscardHandler)
		e, err := New(Record{ExecID: "e", Dir: dir}, conn, []*os.File{process}, log)
		testutil.Must(t, err)
		testutil.Must(t, (&Adopted{e, launcher, spawn}).Close())
		synctest.Wait()
		select {
		case <-removed:
			t.Fatal("the removal has succeeded, or is not repeated")
		default:
		}
		testutil.Must(t, os.Remove(dir))
		testutil.Must(t, os.MkdirAll(filepath.Join(dir, proto.ExecName("e"), "left"), 0o700))
		<-removed
	})
	if _, err := os.Stat(filepath.Join(dir, proto.ExecName("e"))); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the exec's directory is not removed: %v", err)
	}
}
