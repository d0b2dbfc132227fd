package runtime

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/internal/testutil"
	"berth/shim"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// startProcess starts a command and returns it with its pidfd.
func startProcess(t *testing.T, args ...string) (*exec.Cmd, *os.File) {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	testutil.Must(t, cmd.Start())
	f, err := pidfd.Open(cmd.Process.Pid)
	testutil.Must(t, err)
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, f
}

// EndShim records the exit of the container's init. With a sandboxing runtime, init is a program
// that waits for the container and always returns 0, so the code is unknown.
func TestEndShimRecordsExit(t *testing.T) {
	for _, c := range []struct {
		name     string
		runtime  *ociruntime.Runtime
		script   string
		recorded bool
		want     proto.Exit
	}{
		{"libcontainer", nil, "exit 7", true, proto.Exit{Code: 7}},
		{"killed", nil, "kill -9 $$", true, proto.Exit{Code: 137, Signal: 9}},
		{"another runtime", &ociruntime.Runtime{}, "exit 7", true, proto.Exit{Code: 7}},
		{"sandboxed runtime", &ociruntime.Runtime{Sandboxed: true}, "exit 0", false, proto.Exit{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := testProcesses(t)
			testutil.Must(t, os.MkdirAll(k.Node.Shim("c"), 0o700))
			initCmd, init := startProcess(t, "sh", "-c", c.script)
			monitorCmd, monitor := startProcess(t, "sleep", "1000")
			testutil.Must(t, pidfd.Signal(monitor, unix.SIGSTOP))
			run := newRunning(init, monitor, initCmd.Process.Pid, time.Now())
			defer run.Close()
			ended := time.Now()
			run.left.Store(&ended)
			for !run.isZombie() && t.Context().Err() == nil { // a hanging shim does not reap it
				time.Sleep(time.Millisecond)
			}
			group := fmt.Sprintf("/berth-unit-test-no-such-group-%d", os.Getpid())
			testutil.Must(t, k.EndShim(t.Context(), "c", group, c.runtime, run))
			_ = monitorCmd.Wait() // EndShim killed it
			got, err := shim.ReadExit(k.Node.Shim("c"))
			if (err == nil) != c.recorded {
				t.Fatalf("exit %+v, %v", got, err)
			}
			if c.recorded && (got.Code != c.want.Code || got.Signal != c.want.Signal || !got.At.Equal(ended)) {
				t.Errorf("exit %+v, want %+v", got, c.want)
			}
			if settled := run.settled.Err() != nil; settled != c.recorded {
				t.Errorf("settled: %t", settled)
			}
		})
	}
}
