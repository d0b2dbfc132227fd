package integration

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/bench/subject"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

// flow is input that goes on until release, and has at least some MB.
type flow struct {
	random  *rand.ChaCha8
	sum     hash.Hash
	sent    int
	release chan struct{}
	flows   sync.Once
	flowing chan struct{} // closed after the first MB
}

func newFlow() *flow {
	return &flow{random: rand.NewChaCha8([32]byte{}), sum: sha256.New(), release: make(chan struct{}), flowing: make(chan struct{})}
}

// Read implements io.Reader.
func (f *flow) Read(p []byte) (int, error) {
	if f.sent > 1<<20 {
		f.flows.Do(func() { close(f.flowing) })
	}
	if f.sent > 4<<20 {
		select {
		case <-f.release:
			return 0, io.EOF
		default:
		}
	}
	p = p[:min(len(p), 4<<10)]
	n, err := f.random.Read(p)
	f.sum.Write(p[:n])
	f.sent += n
	return n, err
}

// echo is the output of a command that repeats a flow.
type echo struct {
	sum hash.Hash
	got atomic.Int64
}

// Write implements io.Writer.
func (e *echo) Write(p []byte) (int, error) {
	e.got.Add(int64(len(p)))
	return e.sum.Write(p)
}

// repeated is a session that repeats a flow.
type repeated struct {
	*flow
	out   *echo
	ended chan error
}

// repeat runs a session in the background.
func repeat(run func(io.Reader, io.Writer) error) *repeated {
	r := &repeated{flow: newFlow(), out: &echo{sum: sha256.New()}, ended: make(chan error, 1)}
	go func() { r.ended <- run(r.flow, r.out) }()
	return r
}

// check ends the flow and expects that each byte came back once.
func (r *repeated) check(t *testing.T, what string) {
	t.Helper()
	if err := r.end(); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// end ends the flow. It returns an error unless each byte came back once.
func (r *repeated) end() error {
	close(r.release)
	if err := <-r.ended; err != nil {
		return err
	}
	if got := r.out.got.Load(); got != int64(r.sent) {
		return harness.Unexpected("number of bytes", got, r.sent)
	}
	if got, want := r.out.sum.Sum(nil), r.sum.Sum(nil); !bytes.Equal(got, want) {
		return harness.Unexpected("checksum", got, want)
	}
	return nil
}

// repeatExec runs cat in a container, and expects its exit code 7.
func repeatExec(t *testing.T, c *harness.Container, p sessions.Protocol) *repeated {
	address := c.ExecURL(t, remotecommand.StreamOptions{Stdin: &flow{}, Stdout: io.Discard}, "sh", "-c", "cat; exit 7")
	return repeat(func(in io.Reader, out io.Writer) error {
		code, err := p.Stream(t.Context(), sessions.Plain(), address, remotecommand.StreamOptions{Stdin: in, Stdout: out})
		if err == nil && code != 7 {
			err = fmt.Errorf("exit code %d, want 7", code)
		}
		return err
	})
}

// repeatAttach attaches to a container that runs cat.
func repeatAttach(t *testing.T, pod *harness.Pod, p sessions.Protocol) *repeated {
	c := pod.Run(t, harness.Script("exec cat"), func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true })
	address := c.AttachURL(t, remotecommand.StreamOptions{Stdin: &flow{}, Stdout: io.Discard})
	return repeat(func(in io.Reader, out io.Writer) error {
		_, err := p.Stream(t.Context(), sessions.Plain(), address, remotecommand.StreamOptions{Stdin: in, Stdout: out})
		return err
	})
}

// echoServer serves a port of the host that repeats what it gets, until the test ends.
func echoServer(t *testing.T) (port int) {
	t.Helper()
	l := harness.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// repeatForward sends through a forwarded port.
func repeatForward(t *testing.T, address string) *repeated {
	conn := harness.Get(net.Dial("tcp", address))(t).(*net.TCPConn)
	return repeat(func(in io.Reader, out io.Writer) error {
		defer conn.Close()
		sent := make(chan error, 1)
		go func() {
			_, err := io.Copy(conn, in)
			if err == nil {
				err = conn.CloseWrite()
			}
			sent <- err
		}()
		if _, err := io.Copy(out, conn); err != nil {
			return err
		}
		return <-sent
	})
}

// repeatAll runs a session of each kind, and returns when all are in the middle of their flow.
func repeatAll(t *testing.T, c *harness.Container, forwarded string) map[string]*repeated {
	running := map[string]*repeated{"port-forward": repeatForward(t, forwarded)}
	for _, p := range sessions.Protocols {
		running["exec over "+p.Name] = repeatExec(t, c, p)
		running["attach over "+p.Name] = repeatAttach(t, c.Pod, p)
	}
	for _, r := range running {
		select {
		case <-r.flowing:
		case err := <-r.ended: // containerd 2.4 has no WebSocket with the protocol of remotecommand
			r.ended <- err
		}
	}
	return running
}

// replacements replace the daemon by another.
var replacements = []struct {
	name string
	do   func(*testing.T, *harness.Daemon)
}{
	{"stopped", func(t *testing.T, d *harness.Daemon) { d.Restart(t) }},
	{"killed", func(t *testing.T, d *harness.Daemon) { d.Kill(t); d.Start(t) }},
	{"upgraded", func(t *testing.T, d *harness.Daemon) { d.Stop(t); d.UseVersion(t, ""); d.Start(t) }},
}

// useOther makes the daemon use programs that berth takes for another version.
func useOther(t *testing.T, d *harness.Daemon) {
	t.Helper()
	bin := filepath.Join(d.Dir, "older")
	if out, err := exec.Command("cp", "-r", harness.BinDir, bin).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	d.Stop(t)
	d.UseVersion(t, bin, d.Extra...)
	d.Start(t)
}

// Sessions go on while the daemon is replaced: no byte is lost or doubled, and exit codes arrive. A
// URL that the old daemon has issued is valid.
func TestSessionsOutliveDaemon(t *testing.T) {
	for _, replacement := range replacements {
		t.Run(replacement.name, func(t *testing.T) {
			d := harness.StartDaemon(t)
			if replacement.name == "upgraded" {
				useOther(t, d)
			}
			pod := d.RunPod(t, harness.HostNetwork)
			c := pod.Run(t)
			forwarded := sessions.ForwardPort(t, pod, echoServer(t))
			running := repeatAll(t, c, forwarded)
			typed, typing := io.Pipe()
			resize := sessions.Sizes{Resized: make(chan remotecommand.TerminalSize)}
			var screen sessions.Screen
			terminal := remotecommand.StreamOptions{Stdin: typed, Stdout: &screen, Tty: true, TerminalSizeQueue: resize}
			shell := c.ExecURL(t, terminal, "sh")
			shellEnded := make(chan error, 1)
			go func() {
				_, err := sessions.Spdy.Stream(t.Context(), sessions.Plain(), shell, terminal)
				shellEnded <- err
			}()
			send := func(text string) { harness.Get(io.WriteString(typing, text))(t) }
			send("echo up $((6*7))\n")
			screen.WaitFor(t, "up 42")
			var hello sessions.Screen
			o := remotecommand.StreamOptions{Stdout: &hello}
			early := c.ExecURL(t, o, "sh", "-c", "echo hello; exit 9")

			replacement.do(t, d)

			resize.Resized <- remotecommand.TerminalSize{Width: 99, Height: 33}
			send("until [ \"$(stty size)\" = '33 99' ]; do :; done; echo size $((40+2))\n")
			screen.WaitFor(t, "size 42")
			send("exit\n")
			harness.Must(t, <-shellEnded)
			close(resize.Resized)
			running["port-forward of a new connection"] = repeatForward(t, forwarded)
			for what, r := range running {
				r.check(t, what)
			}
			code := harness.Get(sessions.Spdy.Stream(t.Context(), sessions.Plain(), early, o))(t)
			harness.Equal(t, "exit code of the URL that the old daemon issued", code, 9)
			harness.Equal(t, "its output", hello.String(), "hello\n")
		})
	}
}

// An ExecSync in flight fails once when the daemon is killed, and its command does not run again.
func TestExecSyncRunsOnce(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	ended := make(chan error, 1)
	go func() {
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "echo ran >>/tmp/runs; sleep 1000"}, 0)
		ended <- err
	}()
	runs := func() string { return c.Exec(t, "sh", "-c", "cat /tmp/runs || true") }
	harness.EventuallyTrue(t, "the command runs", func() bool { return runs() == "ran" })
	d.Signal(t, 9)
	harness.WantCode(t, <-ended, codes.Unavailable)
	d.Disconnect(t)
	d.Start(t)
	harness.Equal(t, "runs", runs(), "ran")
}

// The end of the process of sessions ends its execs, and the next session works.
func TestProcessOfSessionsIsKilled(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	session := repeatExec(t, c, sessions.Spdy)
	<-session.flowing
	for _, pid := range machine.ProcessesOf("berth-stream") {
		machine.KillProcess(t, pid)
	}
	if err := <-session.ended; err == nil {
		t.Error("the session of a killed process succeeded")
	}
	// Init, which is sleep, does not reap cat if the shell dies first.
	running := func() string { return c.Exec(t, "sh", "-c", "grep -hs '(cat) [^ZX]' /proc/[0-9]*/stat || echo none") }
	harness.EventuallyTrue(t, "the command is killed", func() bool { return running() == "none" })
	next := repeatExec(t, c, sessions.Spdy)
	next.check(t, "the next session")
}

// The process of sessions ends some time after the last session, and the next session starts one.
func TestProcessOfSessionsEndsWithoutSessions(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	for range 2 {
		session := repeatExec(t, c, sessions.Spdy)
		harness.Equal(t, "number of processes", len(d.SessionProcesses()), 1)
		session.check(t, "a session")
		harness.EventuallyTrue(t, "the process ends", func() bool { return len(d.SessionProcesses()) == 0 })
	}
}

// Sessions cost little memory: the process that has them, and what a session adds to it and to the
// daemon.
func TestMemoryOfSessions(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	used := func() (kib, streams int) {
		kib = int(harness.Get(subject.PSS(d.Cmd.Process.Pid))(t)) >> 10
		for _, pid := range d.SessionProcesses() {
			streams += int(harness.Get(subject.PSS(pid))(t)) >> 10
		}
		return kib + streams, streams
	}
	before, _ := used()
	var all []*io.PipeWriter
	ended := make(chan error)
	open := func(n int) (kib, streams int) {
		for range n {
			in, typing := io.Pipe()
			all = append(all, typing)
			var out sessions.Screen
			o := remotecommand.StreamOptions{Stdin: in, Stdout: &out}
			address := c.ExecURL(t, o, "sh", "-c", "echo up; cat")
			go func() {
				_, err := sessions.Spdy.Stream(t.Context(), sessions.Plain(), address, o)
				ended <- err
			}()
			out.WaitFor(t, "up")
		}
		return used()
	}
	one, streams := open(1)
	many, _ := open(49)
	t.Logf("KiB: %d without a session, %d with one, of which %d are the process of sessions, %d with 50", before, one, streams, many)
	if each := (many - one) / 49; each > 1<<10 {
		t.Errorf("each session takes %d KiB", each)
	}
	for _, typing := range all {
		typing.Close()
		harness.Must(t, <-ended)
	}
}
