package shim

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/shim/proto"
	"berth/shim/running"
)

// attached is an attach that runs in the background.
type attached struct {
	env            *env
	stdin          *io.PipeWriter
	stdout, stderr testutil.Buffer
	cancel         context.CancelFunc
	done           chan error
	resize         chan proto.TerminalSize
}

func (c *container) attach(change ...func(*running.AttachIO)) *attached {
	c.Helper()
	ctx, cancel := context.WithCancel(c.ctx)
	r, w := io.Pipe()
	a := &attached{env: c.env, stdin: w, cancel: cancel, done: make(chan error, 1), resize: make(chan proto.TerminalSize)}
	streams := running.AttachIO{Stdin: r, Stdout: &a.stdout, Stderr: &a.stderr, Resize: a.resize}
	for _, f := range change {
		f(&streams)
	}
	go func() {
		err := attachTo(ctx, OpenMonitor(c.Dir), streams)
		r.Close()
		a.done <- err
	}()
	return a
}

func (a *attached) send(text string) {
	a.env.Helper()
	if _, err := io.WriteString(a.stdin, text); err != nil {
		a.env.Fatal(err)
	}
}

// wait returns what Attach returned.
func (a *attached) wait() error {
	a.env.Helper()
	defer a.cancel()
	select {
	case err := <-a.done:
		return err
	case <-a.env.ctx.Done():
		a.env.Fatal("attach does not end")
		return nil
	}
}

func TestOutput(t *testing.T) {
	e := newEnv(t)
	c := e.run("output", "echo to stdout; echo to stderr >&2; printf unfinished")
	c.wait()
	if got := c.output("stdout"); got != "to stdout\nunfinished" {
		t.Errorf("stdout: %q", got)
	}
	if got := c.output("stderr"); got != "to stderr\n" {
		t.Errorf("stderr: %q", got)
	}
	if !strings.Contains(c.log(), " stdout P unfinished\n") {
		t.Errorf("log: %q", c.log())
	}
	info, err := os.Stat(c.LogPath)
	if err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("log's mode: %v, %v", info.Mode(), err)
	}
}

func TestMaxLogLine(t *testing.T) {
	e := newEnv(t)
	c := e.run("split", "printf abcdefghij; echo kl", func(r *proto.Launch) { r.MaxLogLine = 5 })
	c.wait()
	var tags []string
	for line := range strings.Lines(c.log()) {
		f := strings.Fields(line)
		tags = append(tags, f[2]+f[3])
	}
	if got := strings.Join(tags, " "); got != "Pabcde Pfghij Fkl" {
		t.Errorf("records: %s", got)
	}
}

func TestNoLog(t *testing.T) {
	e := newEnv(t)
	c := e.run("no-log", "read x; seq 100000; exit 3", func(r *proto.Launch) { r.LogPath, r.Stdin = "", true })
	a := c.attach()
	a.send("go\n")
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	if got := c.wait(); got.Code != 3 {
		t.Errorf("exit = %+v", got)
	}
	if !strings.HasSuffix(a.stdout.String(), "\n100000\n") {
		t.Errorf("the attached client got %d bytes", len(a.stdout.String()))
	}
}

func TestLargeOutputIsComplete(t *testing.T) {
	e := newEnv(t)
	c := e.run("much", "i=0; while [ $i -lt 64 ]; do head -c 16000 /dev/zero | tr '\\0' x; echo; i=$((i+1)); done; seq 20000 >&2")
	c.wait()
	if got, want := c.output("stdout"), strings.Repeat(strings.Repeat("x", 16000)+"\n", 64); got != want {
		t.Errorf("stdout: %d bytes, want %d", len(got), len(want))
	}
	if got := c.output("stderr"); strings.Count(got, "\n") != 20000 || !strings.HasSuffix(got, "\n20000\n") {
		t.Errorf("stderr: %d lines", strings.Count(got, "\n"))
	}
}

func TestOutputLeftInThePipe(t *testing.T) {
	e := newEnv(t)
	// A process that holds the pipe open, in a PID namespace that outlives init,
	// must not delay the end.
	c := e.run("left", "sleep 1000 & head -c 60000 /dev/zero | tr '\\0' y; exit 0", func(r *proto.Launch) {
		r.Spec.Linux.Namespaces = r.Spec.Linux.Namespaces[1:]
	})
	c.wait()
	if got := c.output("stdout"); got != strings.Repeat("y", 60000) {
		t.Errorf("stdout: %d bytes", len(got))
	}
}

func TestReopenLog(t *testing.T) {
	e := newEnv(t)
	c := e.run("rotate", "echo before; read x; echo after; read x", func(r *proto.Launch) { r.Stdin = true })
	a := c.attach()
	e.until("the first line", func() bool { return c.log() != "" })
	rotated := c.LogPath + ".1"
	if err := os.Rename(c.LogPath, rotated); err != nil {
		t.Fatal(err)
	}
	m := OpenMonitor(c.Dir)
	if err := m.ReopenLog(e.ctx); err != nil {
		t.Fatal(err)
	}
	a.send("x\n")
	e.until("the second line", func() bool { return c.log() != "" })
	if old, err := os.ReadFile(rotated); decodeLog(e, string(old), "stdout") != "before\n" || err != nil {
		t.Errorf("the old file: %q, %v", old, err)
	}
	if got := c.output("stdout"); got != "after\n" {
		t.Errorf("the new file: %q", got)
	}
	a.send("x\n")
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	c.wait()
}

func TestReopenLogFails(t *testing.T) {
	e := newEnv(t)
	for _, obstacle := range []struct {
		name  string
		place func(path string) error
	}{
		{"directory", func(p string) error { return os.Mkdir(p, 0o700) }},
		{"fifo", func(p string) error { return unix.Mkfifo(p, 0o600) }},
		{"link", func(p string) error { return os.Symlink(p+".target", p) }},
	} {
		c := e.run("obstacle-"+obstacle.name, "echo before; read x; echo after", func(r *proto.Launch) { r.Stdin = true })
		a := c.attach()
		e.until("the first line", func() bool { return c.log() != "" })
		rotated := c.LogPath + ".1"
		if err := errors.Join(os.Rename(c.LogPath, rotated), obstacle.place(c.LogPath)); err != nil {
			t.Fatal(err)
		}
		if err := OpenMonitor(c.Dir).ReopenLog(e.ctx); err == nil || !strings.Contains(err.Error(), c.LogPath) {
			t.Errorf("%s: ReopenLog = %v, want an error that names the path", obstacle.name, err)
		}
		if _, err := os.Lstat(c.LogPath + ".target"); err == nil {
			t.Errorf("%s: a file was made through the link", obstacle.name)
		}
		a.send("x\n")
		if err := a.wait(); err != nil {
			t.Error(err)
		}
		c.wait()
		if old, err := os.ReadFile(rotated); decodeLog(e, string(old), "stdout") != "before\nafter\n" || err != nil {
			t.Errorf("%s: the old file: %q, %v", obstacle.name, old, err)
		}
	}
}

func TestFullDisk(t *testing.T) {
	e := newEnv(t)
	disk := e.dir + "/disk"
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	c := e.run("full", "read x; seq 10000; read x; echo after", func(r *proto.Launch) { r.LogPath, r.Stdin = disk+"/log", true })
	a := c.attach()
	a.send("x\n")
	e.until("all is said", func() bool { return strings.HasSuffix(a.stdout.String(), "\n10000\n") })
	full := c.log()
	if n := strings.Count(full, "\n"); n == 0 || n >= 10000 || !strings.HasSuffix(full, "\n") {
		t.Errorf("the log of the full disk has %d lines and ends with %q", n, full[max(0, len(full)-80):])
	}
	// After kubelet's rotation the next record is complete.
	if err := os.Truncate(c.LogPath, 0); err != nil {
		t.Fatal(err)
	}
	a.send("x\n")
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	c.wait()
	if got := c.output("stdout"); got != "after\n" {
		t.Errorf("after there was room again: %q", got)
	}
}

func TestAttachEcho(t *testing.T) {
	e := newEnv(t)
	c := e.run("echo", "while read x; do echo you said $x; echo and on stderr >&2; [ $x = bye ] && exit 8; done", func(r *proto.Launch) { r.Stdin = true })
	a, b := c.attach(), c.attach(func(s *running.AttachIO) { s.Stdin = nil })
	// Both clients are attached when each has received an answer.
	e.until("both get output", func() bool {
		a.send("hello\n")
		return strings.Contains(a.stdout.String(), "you said hello\n") && strings.Contains(b.stdout.String(), "you said hello\n")
	})
	a.send("bye\n")
	for _, x := range []*attached{a, b} {
		if err := x.wait(); err != nil {
			t.Error(err)
		}
		if out := x.stdout.String(); !strings.HasSuffix(out, "you said bye\n") || strings.Contains(out, "stderr") {
			t.Errorf("stdout: %q", out)
		}
		if out := x.stderr.String(); !strings.HasSuffix(out, "and on stderr\n") {
			t.Errorf("stderr: %q", out)
		}
	}
	if got := c.wait(); got.Code != 8 {
		t.Errorf("exit = %+v", got)
	}
}

func TestStdinSurvivesClients(t *testing.T) {
	e := newEnv(t)
	c := e.run("many", "cat; echo end", func(r *proto.Launch) { r.Stdin = true })
	for _, text := range []string{"one\n", "two\n"} {
		a := c.attach()
		a.send(text)
		a.stdin.Close()
		e.until(text, func() bool { return strings.HasSuffix(a.stdout.String(), text) })
		a.cancel()
		if err := a.wait(); !errors.Is(err, context.Canceled) {
			t.Errorf("Attach = %v, want canceled", err)
		}
	}
	if err := OpenMonitor(c.Dir).CloseStdin(e.ctx); err != nil {
		t.Fatal(err)
	}
	c.wait()
	if got := c.output("stdout"); got != "one\ntwo\nend\n" {
		t.Errorf("stdout: %q", got)
	}
}

func TestStdinOnce(t *testing.T) {
	e := newEnv(t)
	once := func(r *proto.Launch) { r.Stdin, r.StdinOnce = true, true }

	eof := e.run("eof", "cat; echo end", once)
	a := eof.attach()
	a.send("input\n")
	a.stdin.Close()
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	eof.wait()
	if got := a.stdout.String(); got != "input\nend\n" {
		t.Errorf("stdout: %q", got)
	}

	gone := e.run("gone", "cat; echo end", once)
	a = gone.attach()
	a.send("input\n")
	e.until("the echo", func() bool { return a.stdout.String() == "input\n" })
	a.cancel()
	if err := a.wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("Attach = %v, want canceled", err)
	}
	gone.wait()
}

// With a grace a client's session ends after its input. The output that follows still arrives, and
// the container's stdin stays open.
func TestAttachEndsWithItsInput(t *testing.T) {
	e := newEnv(t)
	c := e.run("ends", "cat; echo end", func(r *proto.Launch) { r.Stdin = true })
	for _, text := range []string{"one\n", "", "two\n"} {
		a := c.attach(func(s *running.AttachIO) { s.StdinGrace = time.Second })
		a.send(text)
		a.stdin.Close()
		if err := a.wait(); err != nil {
			t.Error(err)
		}
		if got := a.stdout.String(); got != text {
			t.Errorf("stdout: %q, want %q", got, text)
		}
	}
	endless := e.run("endless", "while :; do echo line; done", func(r *proto.Launch) { r.Stdin, r.LogPath = true, "" })
	a := endless.attach(func(s *running.AttachIO) { s.StdinGrace = 10 * time.Millisecond })
	a.stdin.Close()
	if err := a.wait(); err != nil {
		t.Error(err)
	}
}

func TestStdinFasterThanTheContainer(t *testing.T) {
	e := newEnv(t)
	c := e.run("slow-reader", "sleep 0.2; wc -c", func(r *proto.Launch) { r.Stdin, r.StdinOnce = true, true })
	a := c.attach()
	a.send(strings.Repeat("0123456789abcdef", 1<<16)) // 1 MiB, through all buffers
	a.stdin.Close()
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	c.wait()
	if got := strings.TrimSpace(c.output("stdout")); got != "1048576" {
		t.Errorf("the container read %s bytes", got)
	}
}

func TestStdinClosedByTheContainer(t *testing.T) {
	e := newEnv(t)
	c := e.run("stuck", "trap 'exit 0' TERM; exec <&-; echo closed; while :; do sleep 0.01; done", func(r *proto.Launch) { r.Stdin = true })
	a := c.attach()
	e.until("stdin is closed", func() bool { return c.log() != "" })
	a.send(strings.Repeat("x", 200000))
	if err := unix.Kill(c.InitPID, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	if exit := c.wait(); exit.Code != 0 {
		t.Errorf("exit code %d", exit.Code)
	}
}

func TestTerminal(t *testing.T) {
	e := newEnv(t)
	c := e.run("tty", "test -t 0 && test -t 1 && test -t 2 && echo a terminal; while read x; do stty size; [ $x = bye ] && exit 5; done",
		func(r *proto.Launch) { r.Stdin, r.Terminal, r.Spec.Process.Terminal = true, true, true })
	a := c.attach()
	e.until("it starts", func() bool { return strings.Contains(c.output("stdout"), "a terminal\r\n") })
	a.resize <- proto.TerminalSize{Width: 123, Height: 45}
	e.until("the new size", func() bool {
		a.send("x\n")
		return strings.Contains(a.stdout.String(), "45 123\r\n")
	})
	if err := OpenMonitor(c.Dir).Resize(e.ctx, 77, 33); err != nil {
		t.Error(err)
	}
	a.send("bye\n")
	if err := a.wait(); err != nil {
		t.Error(err)
	}
	if got := a.stdout.String(); !strings.HasSuffix(got, "33 77\r\n") {
		t.Errorf("the terminal said %q", got)
	}
	if got := c.wait(); got.Code != 5 {
		t.Errorf("exit = %+v", got)
	}
}

func TestResizeWithoutTerminal(t *testing.T) {
	e := newEnv(t)
	c := e.run("no-tty", "exec sleep 1000")
	if err := OpenMonitor(c.Dir).Resize(e.ctx, 1, 1); err == nil || !strings.Contains(err.Error(), "no terminal") {
		t.Errorf("Resize = %v", err)
	}
}

func TestBadRequests(t *testing.T) {
	e := newEnv(t)
	c := e.run("bad", "read x; exit 3", func(r *proto.Launch) { r.Stdin = true })
	for _, data := range [][]byte{
		proto.AppendHeader(nil, proto.FrameStdin, proto.MaxPayload+1),
		proto.AppendFrame(nil, proto.FrameType(99), nil),
		proto.AppendFrame(nil, proto.FrameAttach, []byte("much too long")),
		proto.AppendFrame(nil, proto.FrameResize, []byte("x")),
		proto.AppendHeader(nil, proto.FrameStdin, 100), // and no more
	} {
		conn, err := OpenMonitor(c.Dir).dial(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		reply, err := io.ReadAll(conn)
		if f, _, _ := proto.NextFrame(reply); len(reply) > 0 && f.Type != proto.FrameError || err != nil {
			t.Errorf("the answer to %q: %q, %v", data, reply, err)
		}
		conn.Close()
	}
	if err := OpenMonitor(c.Dir).CloseStdin(e.ctx); err != nil {
		t.Fatal(err)
	}
	if got := c.wait(); got.Code != 3 {
		t.Errorf("exit = %+v", got)
	}
}

func TestCallsWithoutMonitorFail(t *testing.T) {
	m := OpenMonitor(t.TempDir())
	for what, err := range map[string]error{
		"ReopenLog": m.ReopenLog(context.Background()),
		"Attach":    attachTo(context.Background(), m, running.AttachIO{}),
	} {
		if errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s = %v, want FailedPrecondition", what, err)
		}
	}
}

func TestLogHasNoGapWithoutDaemon(t *testing.T) {
	e := newEnv(t)
	c := e.run("alone", "seq 30000")
	// All objects of the daemon for this container disappear.
	if err := e.Launchers.Close(); err != nil {
		t.Fatal(err)
	}
	c.wait()
	if got := c.output("stdout"); strings.Count(got, "\n") != 30000 {
		t.Errorf("%d lines", strings.Count(got, "\n"))
	}
	var err error
	if e.Launchers, err = New(e.cfg); err != nil { // for the clean-up
		t.Fatal(err)
	}
}
