package pidfd

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"berth/internal/testutil"
)

func TestKillTree(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sh -c 'sleep 1001 & echo $!; wait' & echo $!; wait")
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	fd, err := Open(cmd.Process.Pid)
	testutil.Must(t, err)
	defer fd.Close()
	lines := bufio.NewScanner(out)
	var below []*os.File
	for range 2 {
		if !lines.Scan() {
			t.Fatal(lines.Err())
		}
		pid, err := strconv.Atoi(strings.TrimSpace(lines.Text()))
		testutil.Must(t, err)
		f, err := Open(pid)
		testutil.Must(t, err)
		defer f.Close()
		below = append(below, f)
	}
	testutil.Must(t, KillTree(cmd.Process.Pid, fd))
	for _, f := range below {
		if err := Wait(t.Context(), f); err != nil {
			t.Error(err)
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != -1 {
		t.Errorf("the root of the tree ended with %v", err)
	}
}
