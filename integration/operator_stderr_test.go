package integration

import (
	"fmt"
	"io"
	"net"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/integration/sessions"
)

// libraryLine matches a line of klog, such as "E1123 12:00:00.000000   42 portforward.go:549] …".
var libraryLine = regexp.MustCompile(`(?m)^[IWEF]\d{4} .*$`)

// onlyOwnLines fails if an operator command has printed a library's log lines.
func onlyOwnLines(t *testing.T, printed string) {
	t.Helper()
	if line := libraryLine.FindString(printed); line != "" {
		t.Errorf("stderr has a library's log line: %s\nall: %q", line, printed)
	}
}

// operatorSession is a running operator command with its output.
type operatorSession struct {
	cmd            *exec.Cmd
	stdin          io.WriteCloser
	stdout, stderr sessions.Screen
}

func startSession(t *testing.T, d *harness.Daemon, args ...string) *operatorSession {
	t.Helper()
	s := &operatorSession{cmd: operatorCommand(d, args...)}
	s.stdin = harness.Get(s.cmd.StdinPipe())(t)
	s.cmd.Stdout, s.cmd.Stderr = &s.stdout, &s.stderr
	harness.Must(t, s.cmd.Start())
	t.Cleanup(func() { _ = s.cmd.Process.Kill(); _ = s.cmd.Wait() }) // it has exited, unless the test failed
	return s
}

// keepTyping sends input to the session until the command exits.
func (s *operatorSession) keepTyping(t *testing.T) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		line := []byte(strings.Repeat("x", 1<<10) + "\n")
		for {
			if _, err := s.stdin.Write(line); err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() { <-done })
}

// A session that loses its connection prints one line of berth's own.
func TestOperatorLostSessionPrintsOneLine(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Script("echo up; exec cat"), harness.WithStdin(false))
	running := map[string]*operatorSession{
		"exec":   startSession(t, d, "exec", "-i", c.Id, "sh", "-c", "echo up; exec cat"),
		"attach": startSession(t, d, "attach", "-i", c.Id),
	}
	for name, s := range running {
		s.keepTyping(t)
		s.stdout.WaitFor(t, "xxx")
		t.Logf("%s is connected", name)
	}
	d.Kill(t)
	for name, s := range running {
		t.Run(name, func(t *testing.T) {
			_ = s.cmd.Wait()
			onlyOwnLines(t, s.stderr.String())
			if lines := strings.Count(s.stderr.String(), "\n"); lines > 1 || lines == 1 && !strings.HasPrefix(s.stderr.String(), "berth: "+name+" ") {
				t.Errorf("stderr is %q", s.stderr.String())
			}
			if s.cmd.ProcessState.ExitCode() == 0 {
				t.Error("the exit code of a lost session is 0, want another")
			}
		})
	}
	d.Start(t)
}

// A forwarded connection that its client resets prints nothing. A port without a listener prints an
// error.
func TestOperatorPortForwardPrintsRefusalsOnly(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("while true; do head -c 10000000 /dev/zero | nc -l -p 8392; done"))
	harness.Eventually(t, "the server listens", func() error {
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "netstat -ltn | grep -q :8392"}, 0)
		return err
	})
	s := startSession(t, d, "port-forward", pod.Id, ":8392", ":8393")
	s.stdout.WaitFor(t, " -> 8393")
	resetAfterReading(t, forwardedAddress(t, s, 8392))
	s.stdout.WaitFor(t, "Handling connection")
	harness.Eventually(t, "the server has noticed the reset", func() error { // the pod's side ends, and the server listens again
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "netstat -ltn | grep -q :8392"}, 0)
		return err
	})
	conn := harness.Get(net.Dial("tcp", forwardedAddress(t, s, 8393)))(t)
	defer conn.Close()
	if err := s.cmd.Wait(); err == nil {
		t.Error("the exit code for a port without listener is 0, want another")
	}
	onlyOwnLines(t, s.stderr.String())
	if text := s.stderr.String(); strings.Count(text, "\n") != 1 || !strings.HasPrefix(text, "berth: forward ports of pod ") || !strings.Contains(text, "connection refused") {
		t.Errorf("stderr is %q", text)
	}
}

// forwardedAddress returns the local address of a port-forward for a port of the pod.
func forwardedAddress(t *testing.T, s *operatorSession, port int) string {
	t.Helper()
	m := regexp.MustCompile(fmt.Sprintf(`Forwarding from (\S+) -> %d\n`, port)).FindStringSubmatch(s.stdout.String())
	if m == nil {
		t.Fatalf("port %d is not forwarded: %q", port, s.stdout.String())
	}
	return m[1]
}

// resetAfterReading connects, reads some data and resets the connection.
func resetAfterReading(t *testing.T, address string) {
	t.Helper()
	conn := harness.Get(net.Dial("tcp", address))(t).(*net.TCPConn)
	_, err := io.ReadFull(conn, make([]byte, 1000))
	harness.Must(t, err)
	harness.Must(t, conn.SetLinger(0))
	harness.Must(t, conn.Close())
}
