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

func TestNames(t *testing.T) {
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	pid := child.Process.Pid
	f, err := Open(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd := int(f.Fd())
	if !Names(os.Getpid(), fd, pid) {
		t.Error("the pidfd of a child is not recognized")
	}
	if Names(os.Getpid(), fd, os.Getpid()) || Names(os.Getpid(), 0, pid) || Names(os.Getpid(), 9999, pid) {
		t.Error("another descriptor or process is taken for it")
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := Wait(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	if Names(os.Getpid(), fd, pid) {
		t.Error("a process that has ended is recognized")
	}
}
