package integration

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/integration/harness"
	"berth/integration/machine"
)

// program is a program that runs beside the daemon, such as kubelet, and ends with its test.
type program struct {
	name    string
	logFile string
	cmd     *exec.Cmd
	exited  chan struct{} // closed after cmd.Wait
}

// startProgram starts a program and appends its output to a file. The caller must stop it.
func startProgram(t *testing.T, name, logFile string, args ...string) *program {
	t.Helper()
	log := harness.Get(os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600))(t)
	defer log.Close()
	p := &program{name: name, logFile: logFile, cmd: exec.Command(args[0], args[1:]...), exited: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	harness.Must(t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait() // the result is in cmd.ProcessState
		close(p.exited)
	}()
	return p
}

// finish kills a program that was not stopped. It logs the program's output if the test failed.
func (p *program) finish(t *testing.T) {
	t.Helper()
	p.end(t, syscall.SIGKILL)
	if t.Failed() {
		t.Logf("the log of %s:\n%s", p.name, p.tail())
	}
}

// waitFor waits until a condition that depends on the program is fulfilled.
func (p *program) waitFor(t *testing.T, what string, condition func() error) {
	t.Helper()
	err := harness.PollUpTo(kubeletPatience, kubeletPause, func() error {
		select {
		case <-p.exited:
			t.Fatalf("%s has exited: %v\n%s", p.name, p.cmd.ProcessState, p.tail())
		default:
		}
		return condition()
	})
	if err != nil {
		t.Fatalf("not within %v: %s: %v", kubeletPatience, what, err)
	}
}

// stop stops the program by SIGTERM, as systemd does.
func (p *program) stop(t *testing.T) {
	t.Helper()
	p.end(t, syscall.SIGTERM)
}

func (p *program) end(t *testing.T, signal syscall.Signal) {
	t.Helper()
	select {
	case <-p.exited:
		return
	default:
	}
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	select {
	case <-p.exited:
	case <-time.After(time.Minute):
		harness.Must(t, p.cmd.Process.Kill())
		<-p.exited
		t.Errorf("%s did not exit within a minute of %s", p.name, signal)
	}
}

// tail returns the end of the program's log.
func (p *program) tail() string {
	const limit = 60
	lines := machine.ReadLines(p.logFile)
	return strings.Join(lines[max(0, len(lines)-limit):], "\n")
}
