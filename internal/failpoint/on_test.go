//go:build failpoints

package failpoint

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"berth/internal/testutil"
)

// TestMain also runs the program that has failpoints.
func TestMain(m *testing.M) {
	if dir == "" {
		os.Exit(m.Run())
	}
	for range 3 {
		Reach("test.one")
		Reach("test.two")
	}
}

func TestArmedPointSignalsProcess(t *testing.T) {
	for _, c := range []struct {
		name, armed, trace string
		killed             bool
	}{
		{"not armed", "", "test.one\ntest.two\ntest.one\ntest.two\ntest.one\ntest.two\n", false},
		{"the first time", "test.one 1 kill " + program, "test.one\n", true},
		{"the third time", "test.two 3 kill " + program, "test.one\ntest.two\ntest.one\ntest.two\ntest.one\ntest.two\n", true},
		{"another program", "test.one 1 kill berth", "test.one\ntest.two\ntest.one\ntest.two\ntest.one\ntest.two\n", false},
		{"another process", "test.one 1 kill 1", "test.one\ntest.two\ntest.one\ntest.two\ntest.one\ntest.two\n", false},
		{"later than it is reached", "test.two 10 kill " + program, "test.one\ntest.two\ntest.one\ntest.two\ntest.one\ntest.two\n", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			control := t.TempDir()
			write(t, filepath.Join(control, "trace"), "")
			if c.armed != "" {
				write(t, filepath.Join(control, "armed"), c.armed+"\n")
			}
			state := run(t, control)
			if killed := state.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL; killed != c.killed {
				t.Errorf("the process ended with %v", state)
			}
			trace, err := os.ReadFile(filepath.Join(control, "trace"))
			trace = bytes.ReplaceAll(trace, fmt.Appendf(nil, " %d %s\n", state.Pid(), program), []byte("\n"))
			if err != nil || string(trace) != c.trace {
				t.Errorf("the trace is %q (%v), want %q", trace, err, c.trace)
			}
			if _, err := os.Stat(filepath.Join(control, "armed")); c.killed && !os.IsNotExist(err) {
				t.Errorf("the point is still armed: %v", err)
			}
		})
	}
}

func TestCountsAcrossPrograms(t *testing.T) {
	control := t.TempDir()
	write(t, filepath.Join(control, "armed"), "test.one 4 kill "+program+"\n")
	if state := run(t, control); !state.Success() {
		t.Fatalf("the first ended with %v", state)
	}
	if state := run(t, control); state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("the second ended with %v", state)
	}
}

func run(t *testing.T, control string) *os.ProcessState {
	t.Helper()
	self, err := os.Executable()
	testutil.Must(t, err)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), variable+"="+control)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	t.Logf("%s", out)
	return cmd.ProcessState
}

func write(t *testing.T, path, text string) {
	t.Helper()
	testutil.Must(t, os.WriteFile(path, []byte(text), 0o600))
}
