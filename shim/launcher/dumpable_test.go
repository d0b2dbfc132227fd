package launcher

import (
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The test's own process gets each object that CRIU cannot dump.
func TestUndumpableProcesses(t *testing.T) {
	check := func(want string) {
		t.Helper()
		why, err := undumpable(os.Getpid())
		if err != nil || !strings.Contains(why, want) || want == "" && why != "" {
			t.Errorf("undumpable = %q, %v, want %q", why, err, want)
		}
	}
	check("")

	var params [120]byte // struct io_uring_params
	ring, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno == 0 {
		check("io_uring")
		_ = unix.Close(int(ring))
	} else {
		t.Logf("NOT TESTED: io_uring: %v", errno)
	}

	process, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(process)
	check("")
	thread, err := unix.PidfdOpen(unix.Gettid(), unix.PIDFD_THREAD)
	if err == nil {
		check("PIDFD_THREAD")
		_ = unix.Close(thread)
	} else {
		t.Logf("NOT TESTED: pidfds of threads: %v", err)
	}

	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT|0o600)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := unix.SysvShmAttach(id, 0, 0)
	if _, removeErr := unix.SysvShmCtl(id, unix.IPC_RMID, nil); err != nil || removeErr != nil {
		t.Fatal(err, removeErr)
	}
	check("System V")
	if err := unix.SysvShmDetach(memory); err != nil {
		t.Fatal(err)
	}
	check("")
}

func TestUndumpableFiles(t *testing.T) {
	for target, want := range map[string]bool{
		"/dev/null": false, "/dev/nvidia0": true, "/dev/nvidiactl": true, "/dev/dri/card0": true, "/dev/kfd": true,
		"/data/dev/nvidia0": false, "anon_inode:[io_uring]": true, "anon_inode:[eventpoll]": false, "socket:[1]": false,
	} {
		if got := undumpableFile(target) != ""; got != want {
			t.Errorf("%s: %t", target, got)
		}
	}
}

func TestAncestors(t *testing.T) {
	descends := map[int]bool{os.Getppid(): true}
	if err := findAncestor(os.Getpid(), descends); err != nil || !descends[os.Getpid()] {
		t.Errorf("findAncestor of a child: %v, %v", descends, err)
	}
	other := map[int]bool{os.Getpid(): true}
	if err := findAncestor(os.Getppid(), other); err != nil || other[os.Getppid()] {
		t.Errorf("findAncestor of a parent: %v, %v", other, err)
	}
}

func TestThreadPidfdFlags(t *testing.T) {
	dir := t.TempDir()
	for text, want := range map[string]bool{
		"pos:\t0\nflags:\t02000002\n": false, "pos:\t0\nflags:\t02000202\n": true, "flags:\tx\n": false, "": false,
	} {
		path := dir + "/fdinfo"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := isThreadPidfd(path); got != want {
			t.Errorf("%q: %t", text, got)
		}
	}
}
