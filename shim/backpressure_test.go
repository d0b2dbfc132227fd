package shim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/shim/proto"
	"berth/shim/running"
)

// fullQueues is the monitor's FULL_QUEUES. Below it a client does not block the container.
const fullQueues = 4 << 20

// impatient uses a monitor that clients may block for a second only.
func impatient(t *testing.T) func(*Config) {
	t.Helper()
	if *programs != "" {
		t.Skip("there is no compiler for another monitor")
	}
	program := filepath.Join(os.Getenv(workEnv), "impatient-monitor")
	build := exec.Command("monitor/build", append(monitorOptions, "-impatient", program)...)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", build, err, out)
	}
	return func(c *Config) { c.MonitorPath = program }
}

// untilBlocked waits until a client that does not read has filled the queues, and returns the
// output so far.
func (c *container) untilBlocked() (output string) {
	c.Helper()
	c.until("the queues are full", func() bool {
		before := len(output)
		log := c.log()
		output = decodeLog(c.env, log[:strings.LastIndexByte(log, '\n')+1], "stdout")
		return len(output) >= fullQueues && len(output) == before
	})
	return output
}

// rest reads what a client has not read yet, to the end.
func rest(c *running.Attached) (string, error) {
	var out testutil.Buffer
	err := c.Copy(context.Background(), running.AttachIO{Stdout: &out, Stderr: &out})
	return out.String(), err
}

// lines is the number of lines that count writes: 16 MB.
const lines = 160_000

// count is a script that writes numbered lines.
var count = fmt.Sprintf("awk 'BEGIN { while (i < %d) printf \"%%0100d\\n\", i++ }'", lines)

// counted is the output of count.
func counted(end string) string {
	var b strings.Builder
	for i := range lines {
		fmt.Fprintf(&b, "%0100d%s", i, end)
	}
	return b.String()
}

// A client that pauses gets every byte. Meanwhile the container waits.
func TestPausedClientGetsEveryByte(t *testing.T) {
	for _, test := range []struct {
		name, end string
		terminal  bool
	}{{"pipe", "\n", false}, {"terminal", "\r\n", true}} {
		t.Run(test.name, func(t *testing.T) {
			e := newEnv(t)
			c := e.run("paused", "stty -echo 2>/dev/null; echo; read x; "+count+"; exit 6", func(r *proto.Launch) {
				r.Stdin, r.Terminal, r.Spec.Process.Terminal = true, test.terminal, test.terminal
			})
			e.until("it is ready", func() bool { return c.log() != "" })
			paused := c.attachUnread()
			feed := c.attach(func(s *running.AttachIO) { s.Stdout, s.Stderr = nil, nil })
			feed.send("go\n")
			if n := len(c.untilBlocked()); n > fullQueues+1<<20 { // and what fits into the socket
				t.Errorf("the container could write %d bytes before the client read any", n)
			}
			got, err := rest(paused)
			if err != nil {
				t.Error(err)
			}
			want := counted(test.end)
			if got != want {
				t.Errorf("the client got %d bytes, want %d", len(got), len(want))
			}
			if err := feed.wait(); err != nil {
				t.Error(err)
			}
			if exit := c.wait(); exit.Code != 6 {
				t.Errorf("exit = %+v", exit)
			}
			if logged := c.output("stdout"); logged != test.end+want {
				t.Errorf("the log has %d bytes, want %d", len(logged), len(test.end+want))
			}
		})
	}
}

// Clients that never read share one limit for memory and one for time. Then they are dropped and
// told so, and the container goes on. The log has everything.
func TestStalledClientsAreDropped(t *testing.T) {
	e := newEnv(t, impatient(t))
	c := e.run("stuck", "read x; "+count+"; echo end >&2; read x", func(r *proto.Launch) { r.Stdin = true })
	if err := OpenMonitor(c.Dir).ReopenLog(e.ctx); err != nil { // the monitor is up when it answers
		t.Fatal(err)
	}
	idle := c.monitorMemory()
	const clients = 20
	var stuck []*running.Attached
	for range clients {
		stuck = append(stuck, c.attachUnread())
	}
	live := c.attach(func(s *running.AttachIO) { s.Stdout = nil })
	live.send("go\n")
	e.until("all is said", func() bool { return live.stderr.String() == "end\n" })
	want, total := counted("\n"), 0
	for _, d := range stuck {
		got, err := rest(d)
		if errdefs.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "ten minutes") {
			t.Errorf("a stuck client's end: %v", err)
		}
		if !strings.HasPrefix(want, got) {
			t.Errorf("a stuck client got %d bytes, which are not the first ones", len(got))
		}
		total += len(got)
	}
	if total > fullQueues+clients*(256<<10) { // the limit, and what fits into sockets
		t.Errorf("%d bytes waited for clients that did not read", total)
	}
	if len(monitorOptions) == 0 { // the sanitizers' malloc keeps memory
		e.until("the monitor's memory is released", func() bool { return c.monitorMemory() < idle+256<<10 }) // its buffers for the log stay
	}
	live.send("go\n")
	if err := live.wait(); err != nil {
		t.Error(err)
	}
	c.wait()
	if logged := c.output("stdout"); logged != want {
		t.Errorf("the log has %d bytes, want %d", len(logged), len(want))
	}
}

// A container that is blocked by a client can be killed. Its end does not wait for the client,
// which still gets every byte.
func TestExitWithBlockedClient(t *testing.T) {
	e := newEnv(t)
	c := e.run("killed", "read x; exec yes "+strings.Repeat("y", 99), func(r *proto.Launch) { r.Stdin = true })
	slow := c.attachUnread()
	feed := c.attach(func(s *running.AttachIO) { s.Stdout, s.Stderr = nil, nil })
	feed.send("go\n")
	c.untilBlocked()
	if err := unix.PidfdSendSignal(int(c.Init.Fd()), unix.SIGKILL, nil, 0); err != nil {
		t.Fatal(err)
	}
	if exit := c.wait(); exit.Signal != int(unix.SIGKILL) { // no client has read anything
		t.Errorf("exit = %+v", exit)
	}
	if err := feed.wait(); err != nil {
		t.Error(err)
	}
	got, err := rest(slow)
	if err != nil {
		t.Error(err)
	}
	if logged := c.output("stdout"); got != logged {
		t.Errorf("the client got %d bytes, the log %d", len(got), len(logged))
	}
}

// The time that a client takes for output does not count as silence after the end of its input.
func TestPausedClientWhoseInputHasEnded(t *testing.T) {
	e := newEnv(t)
	c := e.run("answer", "read x; "+count, func(r *proto.Launch) { r.Stdin = true })
	paused := c.attachUnread()
	feed := c.attach(func(s *running.AttachIO) { s.Stdout, s.Stderr = nil, nil })
	feed.send("go\n")
	c.untilBlocked()
	var out testutil.Buffer
	ended := io.NopCloser(strings.NewReader(""))
	if err := paused.Copy(t.Context(), running.AttachIO{Stdin: ended, Stdout: &out, StdinGrace: patience}); err != nil {
		t.Error(err)
	}
	if want := counted("\n"); out.String() != want {
		t.Errorf("the client got %d bytes, want %d", len(out.String()), len(want))
	}
	if err := feed.wait(); err != nil {
		t.Error(err)
	}
}

// The client that is disconnected to make room for another one is told so.
func TestEvictedClientIsTold(t *testing.T) {
	e := newEnv(t)
	c := e.run("crowded", "echo hello; exec sleep 1000")
	first := c.attachUnread()
	for range 64 { // MAX_CLIENTS
		c.attachUnread()
	}
	if _, err := rest(first); errdefs.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "too many clients") {
		t.Errorf("the end of the oldest: %v", err)
	}
}

// The end of a connection is the container's end only if the monitor says so. Monitors of berth 0.2
// never say it. Their clients notice only a loss within a frame.
func TestEndOfConnection(t *testing.T) {
	output := slices.Clip(proto.AppendFrame(nil, proto.FrameStdout, []byte("hello")))
	for _, test := range []struct {
		name   string
		answer []byte // payload
		sent   []byte
		want   codes.Code
	}{
		{"of a container", []byte{proto.AnnouncesEnd}, proto.AppendFrame(output, proto.FrameEnd, nil), codes.OK},
		{"of a client's patience", []byte{proto.AnnouncesEnd}, proto.AppendFrame(output, proto.FrameEnd, []byte("why")), codes.Aborted},
		{"of a monitor", []byte{proto.AnnouncesEnd}, output, codes.Aborted},
		{"with an older monitor", nil, output, codes.OK},
		{"within a frame of an older monitor", nil, output[:len(output)-1], codes.Aborted},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			listener, err := net.Listen("unix", filepath.Join(dir, proto.SocketFile))
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			served := make(chan error, 1)
			go func() { served <- serveAttach(listener, test.answer, test.sent) }()
			var out testutil.Buffer
			err = attachTo(t.Context(), OpenMonitor(dir), running.AttachIO{Stdout: &out})
			if errdefs.Code(err) != test.want {
				t.Errorf("Attach = %v, want %v", err, test.want)
			}
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
	}
}

// serveAttach serves one attach as a monitor does.
func serveAttach(listener net.Listener, answer, output []byte) error {
	conn, err := listener.Accept()
	if err != nil {
		return err
	}
	_, err = conn.Read(make([]byte, proto.HeaderSize+1))
	if err == nil {
		_, err = conn.Write(append(proto.AppendFrame(nil, proto.FrameOK, answer), output...))
	}
	return errors.Join(err, conn.Close())
}
