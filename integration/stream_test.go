package integration

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"crypto/x509"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// protocol is a way in which clients have sessions.
type protocol struct {
	name     string
	executor func(*rest.Config, string) (remotecommand.Executor, error)
}

var (
	// spdy is what kubelet speaks.
	spdy = protocol{"SPDY", func(c *rest.Config, address string) (remotecommand.Executor, error) {
		u, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		return remotecommand.NewSPDYExecutor(c, http.MethodPost, u)
	}}
	// webSocket is version 5.
	webSocket = protocol{"WebSocket", func(c *rest.Config, address string) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(c, http.MethodGet, address)
	}}
	protocols = []protocol{spdy, webSocket}
)

// stream runs a session to its end and returns the command's exit code.
func (p protocol) stream(ctx context.Context, c *rest.Config, address string, options remotecommand.StreamOptions) (int, error) {
	executor, err := p.executor(c, address)
	if err != nil {
		return -1, err
	}
	err = executor.StreamWithContext(ctx, options)
	if code := exitCode(err); code >= 0 {
		return code, nil
	}
	return 0, err
}

// plain is a client without TLS.
func plain() *rest.Config { return &rest.Config{} }

// execURL asks for a session that runs a command.
func (c *container) execURL(t *testing.T, o remotecommand.StreamOptions, cmd ...string) string {
	t.Helper()
	response, err := c.pod.d.cri.Exec(t.Context(), &runtimeapi.ExecRequest{ContainerId: c.id, Cmd: cmd,
		Tty: o.Tty, Stdin: o.Stdin != nil, Stdout: o.Stdout != nil, Stderr: o.Stderr != nil})
	must(t, err)
	return response.Url
}

// attachURL asks for a session with a container.
func (c *container) attachURL(t *testing.T, o remotecommand.StreamOptions) string {
	t.Helper()
	response, err := c.pod.d.cri.Attach(t.Context(), &runtimeapi.AttachRequest{ContainerId: c.id,
		Tty: o.Tty, Stdin: o.Stdin != nil, Stdout: o.Stdout != nil, Stderr: o.Stderr != nil})
	must(t, err)
	return response.Url
}

// screen is a buffer that may be read while it is written.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *screen) waitFor(t *testing.T, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the session shows %q", text), func() error {
		if out := s.String(); !strings.Contains(out, text) {
			return fmt.Errorf("it shows %q", out)
		}
		return nil
	})
}

// sizes is a terminal that is resized when next is sent to.
type sizes struct {
	next chan remotecommand.TerminalSize
}

func (s sizes) Next() *remotecommand.TerminalSize {
	size, ok := <-s.next
	if !ok {
		return nil
	}
	return &size
}

func TestExecSession(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t, env("FROM", "config"))
	for _, p := range protocols {
		t.Run(p.name, func(t *testing.T) {
			var stdout, stderr screen
			o := remotecommand.StreamOptions{Stdin: strings.NewReader("b\na\n"), Stdout: &stdout, Stderr: &stderr}
			code, err := p.stream(t.Context(), plain(), c.execURL(t, o, "sh", "-c", "sort; echo $FROM >&2; exit 7"), o)
			must(t, err) // sort ends with its stdin
			equal(t, "exit code", code, 7)
			equal(t, "stdout", stdout.String(), "a\nb\n")
			equal(t, "stderr", stderr.String(), "config\n")

			o = remotecommand.StreamOptions{Stdout: &screen{}}
			code, err = p.stream(t.Context(), plain(), c.execURL(t, o, "sh", "-c", "cat; kill -9 $$"), o)
			must(t, err) // cat has no stdin
			equal(t, "exit code of a command that was killed", code, 137)
			code, err = p.stream(t.Context(), plain(), c.execURL(t, o, "true"), o)
			must(t, err)
			equal(t, "exit code of true", code, 0)
			_, err = p.stream(t.Context(), plain(), c.execURL(t, o, "no-such-command"), o)
			if err == nil || !strings.Contains(err.Error(), "no-such-command") {
				t.Errorf("a command that does not exist: %v", err)
			}

			o = remotecommand.StreamOptions{Stdout: &screen{}}
			_, err = p.stream(t.Context(), plain(), c.execURL(t, o, "sh", "-c", "sleep 8882 & echo done"), o)
			must(t, err) // and does not wait for the background process
			equal(t, "stdout", o.Stdout.(*screen).String(), "done\n")
		})
	}
}

func TestExecTerminal(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	for _, p := range protocols {
		t.Run(p.name, func(t *testing.T) {
			var out screen
			resize := sizes{make(chan remotecommand.TerminalSize)}
			defer close(resize.next)
			input, typing := io.Pipe()
			defer typing.Close()
			o := remotecommand.StreamOptions{Stdin: input, Stdout: &out, Tty: true, TerminalSizeQueue: resize}
			ended := make(chan error, 1)
			address := c.execURL(t, o, "sh", "-c", "tty; while read x; do stty size; [ $x = bye ] && exit 5; done")
			go func() {
				code, err := p.stream(t.Context(), plain(), address, o)
				ended <- errors.Join(err, wantEqual("exit code", code, 5))
			}()
			out.waitFor(t, "/dev/pts/")
			resize.next <- remotecommand.TerminalSize{Width: 123, Height: 45}
			eventually(t, "the size changes", func() error {
				if _, err := io.WriteString(typing, "x\n"); err != nil {
					return err
				}
				if !strings.Contains(out.String(), "45 123\r\n") {
					return fmt.Errorf("the terminal shows %q", out.String())
				}
				return nil
			})
			_, err := io.WriteString(typing, "bye\n")
			must(t, err)
			must(t, <-ended)
		})
	}
}

func wantEqual[T comparable](what string, got, want T) error {
	if got != want {
		return unexpected(what, got, want)
	}
	return nil
}

// Bytes arrive as they were sent, many of them, in both directions at once.
func TestExecCarriesMegabytes(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	data := bytes.Repeat([]byte("\x00\xff0123456789abcd"), 20<<20/16)
	for _, p := range protocols {
		t.Run(p.name, func(t *testing.T) {
			hash := sha256.New()
			o := remotecommand.StreamOptions{Stdin: bytes.NewReader(data), Stdout: hash}
			code, err := p.stream(t.Context(), plain(), c.execURL(t, o, "cat"), o)
			must(t, err)
			equal(t, "exit code", code, 0)
			if got, want := hash.Sum(nil), sha256.Sum256(data); !bytes.Equal(got, want[:]) {
				t.Error("what came back is not what was sent")
			}
		})
	}
}

func TestManySessionsAtOnce(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	const n = 50
	errs := make([]error, n)
	var running sync.WaitGroup
	for i := range n {
		var out screen
		text := fmt.Sprintf("session %d", i)
		o := remotecommand.StreamOptions{Stdin: strings.NewReader(text), Stdout: &out}
		address := c.execURL(t, o, "sh", "-c", fmt.Sprintf("cat; exit %d", i))
		running.Go(func() {
			code, err := protocols[i%len(protocols)].stream(t.Context(), plain(), address, o)
			errs[i] = errors.Join(err, wantEqual("exit code", code, i), wantEqual("stdout", out.String(), text))
		})
	}
	running.Wait()
	must(t, errors.Join(errs...))
}

// With the client goes what it runs: nobody could end it any more.
func TestExecEndsWithItsClient(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	const script = "trap '' TERM HUP; sleep 7774 & (setsid sleep 7775 &) ; echo started; sleep 7776"
	for _, p := range protocols {
		for _, input := range []struct {
			name  string
			stdin io.Reader
		}{{"without stdin", nil}, {"with stdin that is not read", strings.NewReader(strings.Repeat("x", 100<<10))}} {
			t.Run(p.name+" "+input.name, func(t *testing.T) {
				var out screen
				ctx, hangUp := context.WithCancel(t.Context())
				o := remotecommand.StreamOptions{Stdin: input.stdin, Stdout: &out}
				address := c.execURL(t, o, "sh", "-c", script)
				ended := make(chan error, 1)
				go func() {
					_, err := p.stream(ctx, plain(), address, o)
					ended <- err
				}()
				out.waitFor(t, "started")
				hangUp()
				if err := <-ended; err == nil {
					t.Error("the client was told that its command ended well")
				}
				eventually(t, "everything it started is gone", func() error {
					if left := append(commandLines("sleep 777"), commandLines("sh -c trap")...); len(left) > 0 {
						return fmt.Errorf("still running: %q", left)
					}
					return nil
				})
			})
		}
	}
	equal(t, "the container goes on", c.exec(t, "echo", "alive"), "alive")
}

func TestSessionRefusals(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c, ended := pod.run(t), pod.run(t, command("true"))
	ended.waitExited(t)
	exec := func(req *runtimeapi.ExecRequest) error { _, err := rawRuntime(t, d).Exec(t.Context(), req); return err }
	attach := func(req *runtimeapi.AttachRequest) error {
		_, err := rawRuntime(t, d).Attach(t.Context(), req)
		return err
	}
	forward := func(req *runtimeapi.PortForwardRequest) error {
		_, err := rawRuntime(t, d).PortForward(t.Context(), req)
		return err
	}
	cmd := []string{"true"}
	wantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: ended.id, Cmd: cmd, Stdout: true}), codes.FailedPrecondition, ended.id)
	wantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: "no-such", Cmd: cmd, Stdout: true}), codes.NotFound, "no-such")
	wantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: c.id, Cmd: cmd}), codes.InvalidArgument, "stdin")
	wantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: c.id, Cmd: cmd, Tty: true, Stdout: true, Stderr: true}), codes.InvalidArgument, "tty")
	wantCode(t, attach(&runtimeapi.AttachRequest{ContainerId: ended.id, Stdout: true}), codes.FailedPrecondition, ended.id)
	wantCode(t, attach(&runtimeapi.AttachRequest{ContainerId: c.id, Tty: true, Stdout: true}), codes.InvalidArgument, "tty")
	wantCode(t, forward(&runtimeapi.PortForwardRequest{PodSandboxId: "no-such"}), codes.NotFound, "no-such")
	wantCode(t, forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.id, Port: []int32{65536}}), codes.InvalidArgument, "65536")
	pod.stop(t)
	wantCode(t, forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.id}), codes.FailedPrecondition, pod.id)
}

// A container may end between the URL and the session. The texts name what was asked
// for, and the container once.
func TestSessionOfAContainerThatHasEnded(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	for _, p := range protocols {
		c := pod.run(t)
		o := remotecommand.StreamOptions{Stdout: io.Discard}
		attach, exec := c.attachURL(t, o), c.execURL(t, o, "true")
		c.stop(t, 0)
		for address, other := range map[string]string{attach: "exec", exec: "attach"} {
			_, err := p.stream(t.Context(), plain(), address, o)
			if err == nil || !strings.Contains(err.Error(), "not running") || strings.Contains(err.Error(), other) || strings.Count(err.Error(), c.id) != 1 {
				t.Errorf("%s: %v", p.name, err)
			}
		}
	}
}

// A session in which nothing is sent for stream_idle_timeout is ended, and its command.
func TestIdleSessionIsEnded(t *testing.T) {
	d := startDaemon(t, withConfig(`stream_idle_timeout = "1s"`))
	c := d.runPod(t, hostNetwork).run(t)
	for _, p := range protocols {
		var out screen
		o := remotecommand.StreamOptions{Stdout: &out}
		_, _ = p.stream(t.Context(), plain(), c.execURL(t, o, "sh", "-c", "echo up; exec sleep 7779"), o) // SPDY clients take the end of the connection for a good end
		equal(t, "output", out.String(), "up\n")
		eventually(t, "the command is gone", func() error {
			if left := commandLines("sleep 7779"); len(left) > 0 {
				return fmt.Errorf("still running: %q", left)
			}
			return nil
		})
	}
}

// A URL is good for one session, and is in no log and no error.
func TestTokenIsUsedOnce(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	for _, p := range protocols {
		o := remotecommand.StreamOptions{Stdout: &screen{}}
		address := c.execURL(t, o, "echo", "once")
		token := address[strings.LastIndex(address, "/")+1:]
		wrong := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		response, err := wrong.Get(address + "0")
		must(t, err)
		must(t, response.Body.Close())
		equal(t, "status with a wrong token", response.StatusCode, http.StatusNotFound)
		_, err = p.stream(t.Context(), plain(), address, o)
		must(t, err)
		if _, err := p.stream(t.Context(), plain(), address, o); err == nil {
			t.Errorf("%s: the URL was good for another session", p.name)
		}
		equal(t, "output", o.Stdout.(*screen).String(), "once\n")
		for _, line := range readLines(d.logFile()) {
			if strings.Contains(line, token) {
				t.Errorf("the log has the token: %s", line)
			}
		}
	}
	// Not everybody's, but who has the URL: it is for this node only.
	address, err := url.Parse(c.execURL(t, remotecommand.StreamOptions{Stdout: io.Discard}, "true"))
	must(t, err)
	equal(t, "address", address.Hostname(), "127.0.0.1")
}

// withStdin keeps the container's stdin open, for one session only if once.
func withStdin(once bool) containerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, once }
}

func withTerminal(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true }

// attachment is a session with a container that runs in the background.
type attachment struct {
	typing         *io.PipeWriter
	stdout, stderr screen
	hangUp         context.CancelFunc
	ended          chan error
}

func (c *container) attach(t *testing.T, p protocol, change ...func(*remotecommand.StreamOptions)) *attachment {
	t.Helper()
	ctx, hangUp := context.WithCancel(t.Context())
	input, typing := io.Pipe()
	a := &attachment{typing: typing, hangUp: hangUp, ended: make(chan error, 1)}
	o := remotecommand.StreamOptions{Stdin: input, Stdout: &a.stdout, Stderr: &a.stderr}
	for _, f := range change {
		f(&o)
	}
	address := c.attachURL(t, o)
	go func() {
		_, err := p.stream(ctx, plain(), address, o)
		input.Close()
		a.ended <- err
	}()
	return a
}

func (a *attachment) send(t *testing.T, text string) {
	t.Helper()
	_, err := io.WriteString(a.typing, text)
	must(t, err)
}

const echoScript = "while read x; do echo you said $x; echo and on stderr >&2; [ $x = bye ] && exit 8; done; echo end of input"

func TestAttach(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	for _, p := range protocols {
		t.Run(p.name, func(t *testing.T) {
			c := pod.run(t, script(echoScript), withStdin(false))
			first := c.attach(t, p)
			first.send(t, "hello\n")
			first.stdout.waitFor(t, "you said hello\n")
			first.stderr.waitFor(t, "and on stderr\n")
			first.hangUp()
			<-first.ended
			second := c.attach(t, p) // stdin is still open
			second.send(t, "bye\n")
			must(t, <-second.ended)
			equal(t, "stdout", second.stdout.String(), "you said bye\n")
			equal(t, "exit code", c.waitExited(t).ExitCode, 8)
		})
		t.Run(p.name+" once", func(t *testing.T) {
			c := pod.run(t, script(echoScript), withStdin(true))
			a := c.attach(t, p)
			a.send(t, "one\n")
			must(t, a.typing.Close())
			must(t, <-a.ended)
			equal(t, "stdout", a.stdout.String(), "you said one\nend of input\n")
			c.waitExited(t)
		})
		t.Run(p.name+" terminal", func(t *testing.T) {
			c := pod.run(t, script("tty; while read x; do stty size; [ $x = bye ] && exit 5; done"), withTerminal)
			resize := sizes{make(chan remotecommand.TerminalSize)}
			defer close(resize.next)
			a := c.attach(t, p, func(o *remotecommand.StreamOptions) { o.Tty, o.Stderr, o.TerminalSizeQueue = true, nil, resize })
			resize.next <- remotecommand.TerminalSize{Width: 91, Height: 33}
			eventually(t, "the size changes", func() error {
				if _, err := io.WriteString(a.typing, "x\n"); err != nil {
					return err
				}
				if !strings.Contains(a.stdout.String(), "33 91\r\n") {
					return fmt.Errorf("the terminal shows %q", a.stdout.String())
				}
				return nil
			})
			a.send(t, "bye\n")
			must(t, <-a.ended)
			equal(t, "exit code", c.waitExited(t).ExitCode, 5)
		})
		t.Run(p.name+" without stdin", func(t *testing.T) {
			c := pod.run(t, script("i=0; while [ ! -e /stop ]; do echo line; sleep 0.05; done"))
			a := c.attach(t, p)
			a.send(t, strings.Repeat("nobody reads this\n", 100000)) // and it does not block
			a.stdout.waitFor(t, "line\n")
			c.exec(t, "touch", "/stop")
			must(t, <-a.ended)
		})
	}
}

// The container does not notice that the daemon is replaced.
func TestContainerSurvivesDaemonDuringAttach(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t, script(echoScript), withStdin(true))
	for _, end := range []func(*testing.T){d.stop, d.kill} {
		a := c.attach(t, spdy, func(o *remotecommand.StreamOptions) { o.Stdin = nil }) // stdin would be closed with its client
		exec := make(chan error, 1)
		var out screen
		o := remotecommand.StreamOptions{Stdout: &out}
		address := c.execURL(t, o, "sh", "-c", "echo up; sleep 7777")
		go func() {
			_, err := spdy.stream(t.Context(), plain(), address, o)
			exec <- err
		}()
		out.waitFor(t, "up")
		end(t)
		<-a.ended // SPDY clients take the end of the connection for a good end
		<-exec
		d.start(t)
		equal(t, "state", c.status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
		eventually(t, "the exec has ended with the daemon", func() error {
			if left := commandLines("sleep 7777"); len(left) > 0 {
				return fmt.Errorf("still running: %q", left)
			}
			return nil
		})
	}
	a := c.attach(t, webSocket)
	a.send(t, "bye\n")
	must(t, <-a.ended)
	equal(t, "exit code", c.waitExited(t).ExitCode, 8)
}

// Sessions over TLS. A certificate of the client's is asked for where there is an authority for it,
// and only there.
func TestSessionsOverTLS(t *testing.T) {
	ca := newAuthority(t)
	server, client := ca.issue(t, "127.0.0.1"), ca.issue(t, "127.0.0.1")
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	key := func(name string, k any) string {
		der, err := x509.MarshalPKCS8PrivateKey(k)
		must(t, err)
		return write(name, "PRIVATE KEY", der)
	}
	caFile := write("ca.pem", "CERTIFICATE", ca.cert.Raw)
	serving := []string{
		fmt.Sprintf("stream_tls_cert = %q", write("server.pem", "CERTIFICATE", server.Certificate[0])),
		fmt.Sprintf("stream_tls_key = %q", key("server.key", server.PrivateKey)),
	}
	with := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAFile: caFile,
		CertFile: write("client.pem", "CERTIFICATE", client.Certificate[0]), KeyFile: key("client.key", client.PrivateKey)}}
	without := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAFile: caFile}}
	stranger := &rest.Config{} // does not know the server's authority
	for _, test := range []struct {
		name       string
		config     []string
		goes, fail []*rest.Config
	}{
		{"with the clients' authority", append(serving, fmt.Sprintf("stream_client_ca = %q", caFile)), []*rest.Config{with}, []*rest.Config{without, stranger}},
		{"without", serving, []*rest.Config{without, with}, []*rest.Config{stranger}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := startDaemon(t, withConfig(test.config...)).runPod(t, hostNetwork).run(t)
			for _, p := range protocols {
				session := func(client *rest.Config) (string, error) {
					var out screen
					o := remotecommand.StreamOptions{Stdin: strings.NewReader("secret"), Stdout: &out}
					address := c.execURL(t, o, "cat")
					if !strings.HasPrefix(address, "https://") {
						t.Errorf("the URL is %s", address)
					}
					_, err := p.stream(t.Context(), client, address, o)
					return out.String(), err
				}
				for i, client := range test.fail {
					if out, err := session(client); err == nil || out != "" {
						t.Errorf("%s: client %d had a session: %q, %v", p.name, i, out, err)
					}
				}
				for i, client := range test.goes {
					out, err := session(client)
					if err != nil || out != "secret" {
						t.Errorf("%s: client %d had no session: %q, %v", p.name, i, out, err)
					}
				}
			}
		})
	}
}
