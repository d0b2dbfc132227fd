package process

import (
	"io"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
)

// memoryProgram returns a program in memory that bears the name of a launcher's.
func memoryProgram(t *testing.T) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("berth-shim", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "berth-shim")
	t.Cleanup(func() { f.Close() })
	src, err := os.Open("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if _, err := io.Copy(f, src); err != nil {
		t.Fatal(err)
	}
	return f
}

// An init counts as not started only while it executes the very file that launchers execute, whatever its own file is called.
func TestAwaitCommand(t *testing.T) {
	launchers, container := memoryProgram(t), memoryProgram(t)
	info, err := launchers.Stat()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		program *os.File
		waits   bool
	}{
		"the launchers' file":           {launchers, true},
		"another with the same name":    {container, false},
		"a file of the root filesystem": {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			path := "/bin/sleep"
			if c.program != nil {
				path = "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(int(c.program.Fd()))
			}
			cmd := exec.Command(path, "1000")
			if err := cmd.Start(); err != nil { // it returns after the execve
				t.Fatal(err)
			}
			defer cmd.Wait()
			defer cmd.Process.Kill()
			init, err := pidfd.Open(cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			run := newRunning(init, nil, cmd.Process.Pid, time.Time{})
			defer run.Close()
			k := testKit(t)
			k.LauncherFile = func() os.FileInfo { return info }
			begin := time.Now()
			if c.waits { // until it ends, here
				time.AfterFunc(50*time.Millisecond, func() { _ = cmd.Process.Kill() })
			}
			k.awaitCommand(t.Context(), "c", run)
			if took := time.Since(begin); !c.waits && took >= commandPatience || c.waits && took < 50*time.Millisecond {
				t.Errorf("it was waited for for %v", took)
			}
		})
	}
}
