package integration

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/logs"
	"berth/integration/machine"
	"berth/integration/sessions"
)

func TestExecSession(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Env("FROM", "config"))
	for _, p := range sessions.Protocols {
		t.Run(p.Name, func(t *testing.T) {
			var stdout, stderr sessions.Screen
			o := remotecommand.StreamOptions{Stdin: strings.NewReader("b\na\n"), Stdout: &stdout, Stderr: &stderr}
			code, err := p.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "sort; echo $FROM >&2; exit 7"), o)
			harness.Must(t, err) // sort exits at the end of its stdin
			harness.Equal(t, "exit code", code, 7)
			harness.Equal(t, "stdout", stdout.String(), "a\nb\n")
			harness.Equal(t, "stderr", stderr.String(), "config\n")

			o = remotecommand.StreamOptions{Stdout: &sessions.Screen{}}
			code, err = p.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "cat; kill -9 $$"), o)
			harness.Must(t, err) // cat has no stdin
			harness.Equal(t, "exit code of a command that was killed", code, 137)
			code, err = p.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "true"), o)
			harness.Must(t, err)
			harness.Equal(t, "exit code of true", code, 0)
			_, err = p.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "no-such-command"), o)
			if err == nil || !strings.Contains(err.Error(), "no-such-command") {
				t.Errorf("a command that does not exist: %v", err)
			}

			o = remotecommand.StreamOptions{Stdout: &sessions.Screen{}}
			_, err = p.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "sleep 8882 & echo done"), o)
			harness.Must(t, err) // does not wait for the background process
			harness.Equal(t, "stdout", o.Stdout.(*sessions.Screen).String(), "done\n")
		})
	}
}

func TestExecTerminal(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	for _, p := range sessions.Protocols {
		t.Run(p.Name, func(t *testing.T) {
			var out sessions.Screen
			resize := sessions.Sizes{Resized: make(chan remotecommand.TerminalSize)}
			defer close(resize.Resized)
			input, typing := io.Pipe()
			defer typing.Close()
			o := remotecommand.StreamOptions{Stdin: input, Stdout: &out, Tty: true, TerminalSizeQueue: resize}
			address := c.ExecURL(t, o, "sh", "-c", "tty; while read x; do stty size; [ $x = bye ] && exit 5; done")
			ended := harness.Go(func() error {
				code, err := p.Stream(t.Context(), sessions.Plain(), address, o)
				return errors.Join(err, wantEqual("exit code", code, 5))
			})
			out.WaitFor(t, "/dev/pts/")
			resize.Resized <- remotecommand.TerminalSize{Width: 123, Height: 45}
			harness.Eventually(t, "the size changes", func() error {
				if _, err := io.WriteString(typing, "x\n"); err != nil {
					return err
				}
				if !strings.Contains(out.String(), "45 123\r\n") {
					return fmt.Errorf("the terminal shows %q", out.String())
				}
				return nil
			})
			_, err := io.WriteString(typing, "bye\n")
			harness.Must(t, err)
			harness.Must(t, <-ended)
		})
	}
}

func wantEqual[T comparable](what string, got, want T) error {
	if got != want {
		return harness.Unexpected(what, got, want)
	}
	return nil
}

// Large amounts of bytes arrive unchanged, in both directions at the same time.
func TestExecCarriesMegabytes(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	data := bytes.Repeat([]byte("\x00\xff0123456789abcd"), 20<<20/16)
	for _, p := range sessions.Protocols {
		t.Run(p.Name, func(t *testing.T) {
			hash := sha256.New()
			o := remotecommand.StreamOptions{Stdin: bytes.NewReader(data), Stdout: hash}
			code := harness.Get(p.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "cat"), o))(t)
			harness.Equal(t, "exit code", code, 0)
			if got, want := hash.Sum(nil), sha256.Sum256(data); !bytes.Equal(got, want[:]) {
				t.Error("the output differs from the input")
			}
		})
	}
}

func TestManySessionsAtOnce(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	const n = 50
	errs := make([]error, n)
	var running sync.WaitGroup
	for i := range n {
		var out sessions.Screen
		text := fmt.Sprintf("session %d", i)
		o := remotecommand.StreamOptions{Stdin: strings.NewReader(text), Stdout: &out}
		address := c.ExecURL(t, o, "sh", "-c", fmt.Sprintf("cat; exit %d", i))
		running.Go(func() {
			code, err := sessions.Protocols[i%len(sessions.Protocols)].Stream(t.Context(), sessions.Plain(), address, o)
			errs[i] = errors.Join(err, wantEqual("exit code", code, i), wantEqual("stdout", out.String(), text))
		})
	}
	running.Wait()
	harness.Must(t, errors.Join(errs...))
}

// When the client of an exec disconnects, the exec is killed, because no other client could end it.
func TestExecEndsWithItsClient(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	const script = "trap '' TERM HUP; sleep 7774 & (setsid sleep 7775 &) ; echo started; sleep 7776"
	for _, p := range sessions.Protocols {
		for _, input := range []struct {
			name  string
			stdin io.Reader
		}{{"without stdin", nil}, {"with stdin that is not read", strings.NewReader(strings.Repeat("x", 100<<10))}} {
			t.Run(p.Name+" "+input.name, func(t *testing.T) {
				var out sessions.Screen
				ctx, hangUp := context.WithCancel(t.Context())
				o := remotecommand.StreamOptions{Stdin: input.stdin, Stdout: &out}
				address := c.ExecURL(t, o, "sh", "-c", script)
				ended := harness.Go(func() error { _, err := p.Stream(ctx, sessions.Plain(), address, o); return err })
				out.WaitFor(t, "started")
				hangUp()
				if err := <-ended; err == nil {
					t.Error("the lost session returned no error")
				}
				awaitNoProcesses(t, "sleep 777", "sh -c trap")
			})
		}
	}
	harness.Equal(t, "output of a later exec", c.Exec(t, "echo", "alive"), "alive")
}

func TestSessionRefusals(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c, ended := pod.Run(t), pod.Run(t, harness.Command("true"))
	ended.WaitExited(t)
	exec := func(req *runtimeapi.ExecRequest) error {
		_, err := harness.RawRuntime(t, d).Exec(t.Context(), req)
		return err
	}
	attach := func(req *runtimeapi.AttachRequest) error {
		_, err := harness.RawRuntime(t, d).Attach(t.Context(), req)
		return err
	}
	forward := func(req *runtimeapi.PortForwardRequest) error {
		_, err := harness.RawRuntime(t, d).PortForward(t.Context(), req)
		return err
	}
	cmd := []string{"true"}
	harness.WantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: ended.Id, Cmd: cmd, Stdout: true}), codes.FailedPrecondition, ended.Id)
	harness.WantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: "no-such", Cmd: cmd, Stdout: true}), codes.NotFound, "no-such")
	harness.WantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: c.Id, Cmd: cmd}), codes.InvalidArgument, "stdin")
	harness.WantCode(t, exec(&runtimeapi.ExecRequest{ContainerId: c.Id, Cmd: cmd, Tty: true, Stdout: true, Stderr: true}), codes.InvalidArgument, "tty")
	harness.WantCode(t, attach(&runtimeapi.AttachRequest{ContainerId: ended.Id, Stdout: true}), codes.FailedPrecondition, ended.Id)
	harness.WantCode(t, attach(&runtimeapi.AttachRequest{ContainerId: c.Id, Tty: true, Stdout: true}), codes.InvalidArgument, "tty")
	harness.WantCode(t, forward(&runtimeapi.PortForwardRequest{PodSandboxId: "no-such"}), codes.NotFound, "no-such")
	harness.WantCode(t, forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.Id, Port: []int32{65536}}), codes.InvalidArgument, "65536")
	pod.Stop(t)
	harness.WantCode(t, forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.Id}), codes.FailedPrecondition, pod.Id)
}

// A container may exit between the request for the URL and the session. The error names the request
// and, once, the container.
func TestSessionOfEndedContainer(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, p := range sessions.Protocols {
		c := pod.Run(t)
		o := remotecommand.StreamOptions{Stdout: io.Discard}
		attach, exec := c.AttachURL(t, o), c.ExecURL(t, o, "true")
		c.Stop(t, 0)
		for address, other := range map[string]string{attach: "exec", exec: "attach"} {
			_, err := p.Stream(t.Context(), sessions.Plain(), address, o)
			if err == nil || !strings.Contains(err.Error(), "not running") || strings.Contains(err.Error(), other) || strings.Count(err.Error(), c.Id) != 1 {
				t.Errorf("%s: %v", p.Name, err)
			}
		}
	}
}

// A session without traffic for stream.idle_timeout ends, and its command is killed.
func TestIdleSessionIsEnded(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`stream.idle_timeout = "1s"`))
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	for _, p := range sessions.Protocols {
		harness.Eventually(t, "a session ends after its output", func() error { // the start of the command may take the whole second
			var out sessions.Screen
			o := remotecommand.StreamOptions{Stdout: &out}
			_, _ = p.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "echo up; exec sleep 7779"), o) // SPDY clients treat a closed connection as success
			return wantEqual("output", out.String(), "up\n")
		})
		awaitNoProcesses(t, "sleep 7779")
	}
}

// A URL is valid for one session, and no log or error contains it.
func TestTokenIsUsedOnce(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	for _, p := range sessions.Protocols {
		o := remotecommand.StreamOptions{Stdout: &sessions.Screen{}}
		address := c.ExecURL(t, o, "echo", "once")
		token := address[strings.LastIndex(address, "/")+1:]
		wrong := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		response := harness.Get(wrong.Get(address + "0"))(t)
		harness.Must(t, response.Body.Close())
		harness.Equal(t, "status with a wrong token", response.StatusCode, http.StatusNotFound)
		_, err := p.Stream(t.Context(), sessions.Plain(), address, o)
		harness.Must(t, err)
		if _, err := p.Stream(t.Context(), sessions.Plain(), address, o); err == nil {
			t.Errorf("%s: the URL was valid for another session", p.Name)
		}
		harness.Equal(t, "output", o.Stdout.(*sessions.Screen).String(), "once\n")
		for _, line := range machine.ReadLines(d.LogFile()) {
			if strings.Contains(line, token) {
				t.Errorf("the log contains the token: %s", line)
			}
		}
	}
	// The URL is valid only for its holder and only on this node.
	address := harness.Get(url.Parse(c.ExecURL(t, remotecommand.StreamOptions{Stdout: io.Discard}, "true")))(t)
	harness.Equal(t, "address", address.Hostname(), "127.0.0.1")
}

const echoScript = "while read x; do echo you said $x; echo and on stderr >&2; [ $x = bye ] && exit 8; done; echo end of input"

func TestAttach(t *testing.T) {
	testAttach(t, harness.StartDaemon(t).RunPod(t, harness.HostNetwork))
}

func testAttach(t *testing.T, pod *harness.Pod) {
	t.Helper()
	for _, p := range sessions.Protocols {
		t.Run(p.Name, func(t *testing.T) {
			c := pod.Run(t, harness.Script(echoScript), harness.WithStdin(false))
			first := sessions.Attach(t, c, p)
			first.Send(t, "hello\n")
			first.Stdout.WaitFor(t, "you said hello\n")
			first.Stderr.WaitFor(t, "and on stderr\n")
			first.HangUp()
			<-first.Ended
			second := sessions.Attach(t, c, p) // stdin is still open
			second.Send(t, "bye\n")
			harness.Must(t, <-second.Ended)
			harness.Equal(t, "stdout", second.Stdout.String(), "you said bye\n")
			harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 8)
		})
		t.Run(p.Name+" once", func(t *testing.T) {
			c := pod.Run(t, harness.Script(echoScript), harness.WithStdin(true))
			a := sessions.Attach(t, c, p)
			a.Send(t, "one\n")
			harness.Must(t, a.Typing.Close())
			harness.Must(t, <-a.Ended)
			harness.Equal(t, "stdout", a.Stdout.String(), "you said one\nend of input\n")
			c.WaitExited(t)
		})
		t.Run(p.Name+" terminal", func(t *testing.T) {
			c := pod.Run(t, harness.Script("tty; while read x; do stty size; [ $x = bye ] && exit 5; done"), harness.WithTerminal)
			resize := sessions.Sizes{Resized: make(chan remotecommand.TerminalSize)}
			defer close(resize.Resized)
			a := sessions.Attach(t, c, p, func(o *remotecommand.StreamOptions) { o.Tty, o.Stderr, o.TerminalSizeQueue = true, nil, resize })
			resize.Resized <- remotecommand.TerminalSize{Width: 91, Height: 33}
			harness.Eventually(t, "the size changes", func() error {
				if _, err := io.WriteString(a.Typing, "x\n"); err != nil {
					return err
				}
				if !strings.Contains(a.Stdout.String(), "33 91\r\n") {
					return fmt.Errorf("the terminal shows %q", a.Stdout.String())
				}
				return nil
			})
			a.Send(t, "bye\n")
			harness.Must(t, <-a.Ended)
			harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 5)
		})
		t.Run(p.Name+" without stdin", func(t *testing.T) {
			c := pod.Run(t, harness.Script("i=0; while [ ! -e /stop ]; do echo line; sleep 0.05; done"))
			a := sessions.Attach(t, c, p)
			a.Send(t, strings.Repeat("nobody reads this\n", 100000)) // must not block
			a.Stdout.WaitFor(t, "line\n")
			c.Release(t, "/stop")
			harness.Must(t, <-a.Ended)
		})
	}
}

// paused is the output of a client that reads when it is released.
type paused struct {
	hash.Hash
	released chan struct{}
}

func (p paused) Write(b []byte) (int, error) {
	<-p.released
	return p.Hash.Write(b)
}

// A client that pauses while a container writes much gets every byte. The container waits for it,
// and can be stopped meanwhile. The log has every byte, too.
func TestAttachedClientPauses(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	const script = "read x; awk 'BEGIN { while (i < 500000) printf \"%0100d\\n\", i++ }'; exit 7"
	for _, p := range sessions.Protocols {
		for _, kill := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s killed %t", p.Name, kill), func(t *testing.T) {
				c := pod.Run(t, harness.Script(script), harness.WithStdin(false))
				out := paused{sha256.New(), make(chan struct{})}
				a := sessions.Attach(t, c, p, func(o *remotecommand.StreamOptions) { o.Stdout = out })
				a.Send(t, "go\n")
				var size int64
				harness.EventuallyTrue(t, "the container waits for the client", func() bool {
					before := size
					info, err := os.Stat(c.LogPath())
					harness.Must(t, err)
					size = info.Size()
					return size > 4<<20 && size == before
				})
				code := int32(7)
				if kill {
					c.Stop(t, 0)
					code = 137
				} else {
					harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
				}
				close(out.released)
				harness.Must(t, <-a.Ended)
				harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, code)
				logged := logs.Text(c.Log(t))
				harness.Equal(t, "hash of the output", fmt.Sprintf("%x", out.Sum(nil)), sha256Of(logged))
				if !kill {
					harness.Equal(t, "length of the output", len(logged), 500_000*101)
				}
			})
		}
	}
}

// If the monitor dies, its attached clients get an error. It does not look like the container's
// end.
func TestAttachWithoutMonitorFails(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, p := range sessions.Protocols {
		c := pod.Run(t, harness.Script("while :; do echo up; sleep 0.1; done"))
		a := sessions.Attach(t, c, p)
		a.Stdout.WaitFor(t, "up\n")
		machine.KillProcess(t, harness.MonitorOf(t, d, c))
		if err := <-a.Ended; err == nil || !strings.Contains(err.Error(), "output is missing") {
			t.Errorf("%s: the session ended with %v", p.Name, err)
		}
		c.WaitExited(t)
	}
}

// attachCase is a container's stdin and how its first client leaves.
type attachCase struct{ stdin, once, tty, hangUp bool }

// staysOpen reports whether the container's stdin stays open for other clients. kubectl's option
// --leave-stdin-open means once = false.
func (k attachCase) staysOpen() bool { return k.stdin && (!k.once || k.tty) }

// The end of a client's input ends its session if the container's stdin stays open, as in
// containerd. Otherwise the session goes on until the container ends.
func TestAttachEndsWithStdin(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for i := range 1 << 4 {
		k := attachCase{stdin: i&1 != 0, once: i&2 != 0, tty: i&4 != 0, hangUp: i&8 != 0}
		for _, p := range sessions.Protocols {
			t.Run(fmt.Sprintf("%+v %s", k, p.Name), func(t *testing.T) { k.run(t, pod, p) })
		}
	}
}

func (k attachCase) run(t *testing.T, pod *harness.Pod, p sessions.Protocol) {
	script := "until [ -e /stop ]; do sleep 0.05; done; echo later"
	if k.stdin {
		script = "cat; " + script
	}
	c := pod.Run(t, harness.Script(script), func(c *runtimeapi.ContainerConfig) {
		c.Stdin, c.StdinOnce, c.Tty = k.stdin, k.once, k.tty
	})
	attach := func() *sessions.Attachment {
		return sessions.Attach(t, c, p, func(o *remotecommand.StreamOptions) {
			if k.tty {
				o.Tty, o.Stderr = true, nil
			}
		})
	}
	a := attach()
	a.Send(t, "say hello\n")
	if k.hangUp {
		if k.stdin {
			a.Stdout.WaitFor(t, "say hello")
		}
		a.HangUp()
		<-a.Ended
	} else {
		harness.Must(t, a.Typing.Close())
	}
	switch {
	case k.staysOpen():
		if !k.hangUp {
			harness.Must(t, <-a.Ended)
		}
		harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
		next := attach()
		next.Send(t, "say more\n")
		next.Stdout.WaitFor(t, "say more")
		next.HangUp()
		<-next.Ended
		c.Stop(t, 0)
	case !k.hangUp:
		c.Release(t, "/stop")
		harness.Must(t, <-a.Ended)
		harness.WantText(t, "output", a.Stdout.String(), "later")
		c.WaitExited(t)
	default:
		c.Release(t, "/stop") // without input, or at its end
		c.WaitExited(t)
	}
	if k.stdin {
		harness.WantText(t, "output", a.Stdout.String(), "say hello")
	}
}

// Sessions work over TLS. The server requires a client certificate only if stream.client_ca is set.
func TestSessionsOverTLS(t *testing.T) {
	ca := newAuthority(t)
	server, client := ca.issue(t, "127.0.0.1"), ca.issue(t, "127.0.0.1")
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		harness.Must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	key := func(name string, k any) string {
		der := harness.Get(x509.MarshalPKCS8PrivateKey(k))(t)
		return write(name, "PRIVATE KEY", der)
	}
	caFile := write("ca.pem", "CERTIFICATE", ca.cert.Raw)
	serving := []string{
		fmt.Sprintf("stream.tls_cert = %q", write("server.pem", "CERTIFICATE", server.Certificate[0])),
		fmt.Sprintf("stream.tls_key = %q", key("server.key", server.PrivateKey)),
	}
	with := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAFile: caFile,
		CertFile: write("client.pem", "CERTIFICATE", client.Certificate[0]), KeyFile: key("client.key", client.PrivateKey)}}
	without := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAFile: caFile}}
	stranger := &rest.Config{} // does not trust the server's authority
	for _, test := range []struct {
		name       string
		config     []string
		goes, fail []*rest.Config
	}{
		{"with the clients' authority", append(serving, fmt.Sprintf("stream.client_ca = %q", caFile)), []*rest.Config{with}, []*rest.Config{without, stranger}},
		{"without", serving, []*rest.Config{without, with}, []*rest.Config{stranger}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := harness.StartDaemon(t, harness.WithConfig(test.config...)).RunPod(t, harness.HostNetwork).Run(t)
			for _, p := range sessions.Protocols {
				session := func(client *rest.Config) (string, error) {
					var out sessions.Screen
					o := remotecommand.StreamOptions{Stdin: strings.NewReader("secret"), Stdout: &out}
					address := c.ExecURL(t, o, "cat")
					if !strings.HasPrefix(address, "https://") {
						t.Errorf("the URL is %s", address)
					}
					_, err := p.Stream(t.Context(), client, address, o)
					return out.String(), err
				}
				for i, client := range test.fail {
					if out, err := session(client); err == nil || out != "" {
						t.Errorf("%s: client %d had a session: %q, %v", p.Name, i, out, err)
					}
				}
				for i, client := range test.goes {
					out, err := session(client)
					if err != nil || out != "secret" {
						t.Errorf("%s: client %d had no session: %q, %v", p.Name, i, out, err)
					}
				}
			}
		})
	}
}

func sha256Of(content string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(content))) }

// authority is a certificate authority for one test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key := harness.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := harness.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))(t)
	cert := harness.Get(x509.ParseCertificate(der))(t)
	return &authority{cert: cert, key: key}
}

// issue returns a certificate for a server at address, which is also valid for a client.
func (a *authority) issue(t *testing.T, address string) tls.Certificate {
	t.Helper()
	key := harness.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: address}, IPAddresses: []net.IP{net.ParseIP(address)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der := harness.Get(x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key))(t)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// requireClient returns a server configuration that requires a client certificate of this
// authority.
func (a *authority) requireClient() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
}

// writeFiles writes the authority's certificate, and a client's certificate and key.
func (a *authority) writeFiles(t *testing.T, dir string) (ca, cert, key string) {
	t.Helper()
	client := a.issue(t, "127.0.0.1")
	private := harness.Get(x509.MarshalPKCS8PrivateKey(client.PrivateKey))(t)
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		harness.Must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	return write("ca.crt", "CERTIFICATE", a.cert.Raw), write("client.cert", "CERTIFICATE", client.Certificate[0]), write("client.key", "PRIVATE KEY", private)
}
