package operator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/client/clienttest"
	"berth/internal/testutil"
	streams "berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
	"berth/server/streaming"
)

// commands is a runtime of sessions without processes.
type commands struct{ streaming.Runtime }

// Exec understands a few commands.
func (commands) Exec(ctx context.Context, session wire.Session, s streams.IO) (int32, error) {
	command, terminal := session.Command, session.TTY
	switch command[0] {
	case "cat":
		if s.Stdin == nil {
			return 0, nil
		}
		_, err := io.Copy(s.Stdout, s.Stdin)
		return 0, err
	case "complain":
		_, err := fmt.Fprintf(s.Stderr, "%s\n", strings.Join(command[1:], "\n"))
		return 5, err
	case "tty":
		_, err := fmt.Fprintf(s.Stdout, "%t %t", terminal, s.Stderr == nil)
		return 0, err
	case "hang":
		if _, err := io.WriteString(s.Stdout, "up"); err != nil {
			return 0, err
		}
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return 0, errors.New("no such command: " + command[0])
}

// offering is a server that offers the sessions of requests.
type offering struct{ *streaming.Server }

func (o offering) Exec(r *runtimeapi.ExecRequest) (string, error) {
	return o.Offer(wire.Session{Kind: wire.Exec, Command: r.Cmd, TTY: r.Tty, Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr})
}

func (o offering) Attach(r *runtimeapi.AttachRequest) (string, error) {
	return o.Offer(wire.Session{Kind: wire.Attach, TTY: r.Tty, Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr})
}

// newSessions returns a console with a pod "web" whose container "app" has sessions.
func newSessions(t *testing.T) *console {
	t.Helper()
	server, err := streaming.Listen(streaming.Config{Address: "127.0.0.1:0", IdleTimeout: time.Hour, Log: slog.New(slog.DiscardHandler)}, commands{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	c := newConsole(t, &clienttest.Server{Sessions: offering{server}})
	c.detach("containers: [" + app("app") + "]")
	return c
}

func TestExec(t *testing.T) {
	c := newSessions(t)
	c.stdin = "typed"
	for _, tt := range []struct {
		args           []string
		stdout, stderr string
		code           int
	}{
		{[]string{"app", "complain", "-l", "--all"}, "", "-l\n--all\n", 5},
		{[]string{"app", "cat"}, "", "", 0},
		{[]string{"-i", "app", "cat"}, "typed", "", 0},
		{[]string{"app", "tty"}, "false false", "", 0},
		{[]string{"-it", "web/app", "tty"}, "true true",
			"berth: warning: standard input is not a terminal; leave out -t for a pipe or file\n", 0},
	} {
		stdout, stderr, code := c.do(append([]string{"exec"}, tt.args...)...)
		if stdout != tt.stdout || stderr != tt.stderr || code != tt.code {
			t.Errorf("%q: %q, %q, %d", tt.args, stdout, stderr, code)
		}
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"app", "frob"}, ": no such command: frob\n"},
		{[]string{"other", "cat"}, `no container or pod "other"` + "\n"},
	} {
		if _, stderr, code := c.do(append([]string{"exec"}, tt.args...)...); code != 125 || !strings.HasSuffix(stderr, tt.want) {
			t.Errorf("%q: %q, %d", tt.args, stderr, code)
		}
	}
	c.Hook = func(context.Context, string) error {
		return status.Error(codes.FailedPrecondition, "it is not running")
	}
	if _, stderr, code := c.do("exec", "app", "cat"); code != 125 || !strings.HasSuffix(stderr, "not possible in this state: it is not running\n") {
		t.Errorf("%q, %d", stderr, code)
	}
}

// Ctrl-C ends the session, and with it the command.
func TestSessionInterrupted(t *testing.T) {
	c := newSessions(t)
	c.onOutput = func() { raise(t, syscall.SIGINT) }
	if stdout, stderr, code := c.do("exec", "app", "hang"); stdout != "up" || stderr != "berth: interrupted\n" || code != 130 {
		t.Errorf("exec: %q, %q, %d", stdout, stderr, code)
	}
}

// Options that CRI lacks must not be dropped silently.
func TestExecOptionsNeedBerth(t *testing.T) {
	c := newSessions(t)
	_, stderr, code := c.do("exec", "-w", "/tmp", "app", "cat")
	if code != 125 || !strings.Contains(stderr, "need berth 0.3 or later as the runtime") {
		t.Errorf("%q, %d", stderr, code)
	}
	if calls := c.Calls(); slices.ContainsFunc(calls, func(call string) bool { return strings.HasPrefix(call, "Exec ") }) {
		t.Errorf("calls: %q", calls)
	}
}

func TestExecTakesFlagsOfKubectl(t *testing.T) {
	c := newSessions(t)
	if stdout, stderr, code := c.do("exec", "web", "-c", "app", "-i", "--", "tty"); stdout != "false false" || code != 0 {
		t.Errorf("%q, %q, %d", stdout, stderr, code)
	}
	for want, args := range map[string][]string{
		"name a container and a command: berth exec NAME": {"exec", "web"},
		"put flags before the name":                       {"exec", "web", "-it", "sh"},
		`no container "none", but app`:                    {"exec", "-c", "none", "web", "sh"},
		"unknown flag: --frob":                            {"exec", "web", "--frob", "--", "sh"},
	} {
		if _, stderr, code := c.do(args...); code != 125 || !strings.Contains(stderr, want) {
			t.Errorf("%q: %q, %d; want %q", args, stderr, code, want)
		}
	}
}

// Exited containers do not make the name of a pod ambiguous for commands that need a running one.
func TestOnlyRunningContainerIsChosen(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{"done": {Exits: []int32{3}}}})
	c.detach("containers: [" + app("app") + ", " + app("done") + "]")
	conn, err := client.Dial(t.Context(), c.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for ref, want := range map[string]string{"web": "app", "web/done": "", "default/web": "app"} {
		got, err := findRunning(t.Context(), conn, ref, "")
		if got.GetMetadata().GetName() != want && err == nil || (want == "") != (err != nil) {
			t.Errorf("%s: %v, %v", ref, got, err)
		}
	}
	for want, source := range map[string]nameSource{
		"web/app\tcontainer, running": runningNames, "done\texited app\trunning": containersOfPod("web"), "web/app:/": containerPaths,
	} {
		names, err := source(t.Context(), conn)
		if got := strings.Join(names, " "); err != nil || !strings.HasPrefix(got, want) || strings.Contains(got, "web/done") {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
}

// A session whose connection is lost is no success.
func TestLostSessionFails(t *testing.T) {
	server, err := streaming.Listen(streaming.Config{Address: "127.0.0.1:0", IdleTimeout: time.Hour, Log: slog.New(slog.DiscardHandler)}, commands{})
	testutil.Must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(ctx) })
	defer running.Wait()
	defer cancel()
	address, err := offering{server}.Exec(&runtimeapi.ExecRequest{Cmd: []string{"hang"}, Stdout: true})
	testutil.Must(t, err)
	u, err := url.Parse(address)
	testutil.Must(t, err)
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	defer proxy.Close()
	host := u.Host
	running.Go(func() { dropAfter(t, proxy, host, "up") })
	u.Host = proxy.Addr().String()
	var s session
	err = s.stream(t.Context(), func(context.Context) (string, error) { return u.String(), nil },
		remotecommand.StreamOptions{Stdout: io.Discard})
	if !errors.Is(err, errNoResult) {
		t.Errorf("the session ended with %v", err)
	}
}

// dropAfter passes on a connection until the server has sent a text.
func dropAfter(t *testing.T, l net.Listener, server, text string) {
	client, err := l.Accept()
	if err != nil {
		return
	}
	defer client.Close()
	conn, err := net.Dial("tcp", server)
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close()
	go func() { _, _ = io.Copy(conn, client) }()
	buffer := make([]byte, 1<<10)
	for {
		n, err := conn.Read(buffer)
		_, _ = client.Write(buffer[:n])
		if err != nil || bytes.HasSuffix(buffer[:n], []byte(text)) {
			return
		}
	}
}
