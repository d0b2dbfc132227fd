package subject

import (
	"bufio"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Events of a process count, and those of processes that it starts later and that have ended.
func TestCountsDescendants(t *testing.T) {
	shell := exec.Command("sh", "-c", "read go; sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done'; echo done; read end")
	in, err := shell.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := shell.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := shell.Start(); err != nil {
		t.Fatal(err)
	}
	defer shell.Wait()
	defer in.Close()
	// Not every machine counts instructions, but all count this.
	c, err := count(event{unix.PERF_TYPE_SOFTWARE, unix.PERF_COUNT_SW_TASK_CLOCK}, shell.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if _, err := in.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	got, err := c.read()
	if err != nil {
		t.Fatal(err)
	}
	if least := 5 * time.Millisecond; time.Duration(got) < least {
		t.Errorf("the shells ran for %v, at least %v are expected", time.Duration(got), least)
	}
}

// A machine without counters of instructions reports none.
func TestInstructionsOfThisMachine(t *testing.T) {
	s := &Subject{Pid: 1}
	before, ok, err := s.Instructions()
	if err != nil {
		t.Fatal(err)
	}
	after, again, err := s.Instructions()
	if err != nil || ok != again || after < before || !ok && after != 0 {
		t.Errorf("%d, %v, then %d, %v, %v", before, ok, after, again, err)
	}
	if err := s.counters.close(); err != nil {
		t.Error(err)
	}
}
