package pidfd

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

func TestKillTree(t *testing.T) {
	cmd := exec.Command("sh", "-c", "sh -c 'sleep 1001 & echo $!; wait' & echo $!; wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	fd, err := Open(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	lines := bufio.NewScanner(out)
	var below []*os.File
	for range 2 {
		if !lines.Scan() {
			t.Fatal(lines.Err())
		}
		pid, err := strconv.Atoi(strings.TrimSpace(lines.Text()))
		if err != nil {
			t.Fatal(err)
		}
		f, err := Open(pid)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		below = append(below, f)
	}
	if err := KillTree(cmd.Process.Pid, fd); err != nil {
		t.Fatal(err)
	}
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
