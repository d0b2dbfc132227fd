package pidfd

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// zombie starts a child that exits as the script determines, and returns its pidfd. The child is
// not reaped before the test ends.
func zombie(t *testing.T, script string) (cmd *exec.Cmd, f *os.File) {
	t.Helper()
	cmd = exec.Command("sh", "-c", script)
	testutil.Must(t, cmd.Start())
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	testutil.Must(t, err)
	f = os.NewFile(uintptr(fd), "pidfd")
	t.Cleanup(func() { _ = cmd.Wait(); f.Close() })
	return cmd, f
}

func TestEndStatus(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		want   unix.WaitStatus
	}{
		"exited": {"exit 7", 7 << 8},
		"well":   {"exit 0", 0},
		"killed": {"kill -KILL $$", unix.WaitStatus(unix.SIGKILL)},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, f := zombie(t, c.script)
			got, err := EndStatus(f)
			for errors.Is(err, ErrNotKnown) && t.Context().Err() == nil { // the child still runs for a moment
				time.Sleep(time.Millisecond)
				got, err = EndStatus(f)
			}
			if err != nil || got != c.want {
				t.Errorf("%x, %v; want %x", got, err, c.want)
			}
			_ = cmd.Wait() // the script determines the error
			got, err = EndStatus(f)
			if KeepsStatus() && (err != nil || got != c.want) || !KeepsStatus() && !errors.Is(err, ErrNotKnown) {
				t.Errorf("reaped: %x, %v", got, err)
			}
		})
	}
}

func TestEndStatusOfRunning(t *testing.T) {
	_, f := start(t, "sleep", "1000")
	if got, err := EndStatus(f); !errors.Is(err, ErrNotKnown) {
		t.Errorf("%x, %v", got, err)
	}
}

func TestParseZombie(t *testing.T) {
	line := func(name, state, status string) string {
		return "7 (" + name + ") " + state + strings.Repeat(" -1", 52-4) + " " + status + "\n"
	}
	for name, c := range map[string]struct {
		stat string
		want int // -1: unknown
	}{
		"exited":             {line("sh", "Z", "1792"), 7 << 8},
		"a name like a stat": {line(line("x", "Z", "9"), "Z", "256"), 256},
		"runs":               {line("sh", "S", "256"), -1},
		"too large":          {line("sh", "Z", "65536"), -1},
		"negative":           {line("sh", "Z", "-1"), -1},
		"cut off":            {"7 (sh) Z 1 2 3", -1},
		"nothing":            {"", -1},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseZombie([]byte(c.stat))
			if (err == nil) != (c.want >= 0) || err == nil && int(got) != c.want {
				t.Errorf("%d, %v; want %d", got, err, c.want)
			}
		})
	}
}
