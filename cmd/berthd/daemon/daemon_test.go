package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/config"
	"berth/internal/cleanup"
	"berth/internal/task"
	"berth/sandbox"
	"berth/sandbox/state"
	"berth/server"
)

var discardLog = slog.New(slog.DiscardHandler)

func TestSecondDaemonIsRefused(t *testing.T) {
	dir := t.TempDir()
	first := &config.Config{Root: filepath.Join(dir, "root"), State: filepath.Join(dir, "state")}
	closing := cleanup.New()
	if err := lockDirectories(first, closing); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{first.Root, first.State} {
		info, err := os.Stat(d)
		if err != nil || info.Mode() != fs.ModeDir|0o700 {
			t.Errorf("%s: %v, %v", d, info, err)
		}
	}
	for _, second := range []*config.Config{
		{Root: first.Root, State: filepath.Join(dir, "other-state")},
		{Root: filepath.Join(dir, "other-root"), State: first.State},
	} {
		undo := cleanup.New()
		err := lockDirectories(second, undo)
		if err == nil || !strings.Contains(err.Error(), "another berth uses") || !strings.Contains(err.Error(), fmt.Sprintf("process %d holds it", os.Getpid())) {
			t.Errorf("root %s, state %s: %v", second.Root, second.State, err)
		}
		undo.Run(&err)
	}
	var err error
	closing.Run(&err)
	if err != nil {
		t.Fatal(err)
	}
	again := cleanup.New()
	if err := lockDirectories(first, again); err != nil {
		t.Errorf("after the first one ended: %v", err)
	}
	again.Run(&err)
}

func TestPrivateDirRestrictsExistingDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := privateDir(dir); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// systemd must receive READY when requests are served, and STOPPING when the daemon stops. The
// socket must be gone afterwards.
func TestSystemdIsNotifiedOfStartAndStop(t *testing.T) {
	dir := t.TempDir()
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer systemd.Close()
	t.Setenv("NOTIFY_SOCKET", filepath.Join(dir, "notify"))
	path := filepath.Join(dir, "berth.sock")
	listener, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	events := server.OpenEventLog(t.TempDir(), discardLog)
	go func() {
		a := newAssembly(config.Default(), discardLog)
		a.waits = new(task.Waits)
		cfg := server.Config{Version: "1.2.3", Events: events}
		done <- a.announce(ctx, listener, server.New(cfg, noPods{}, nil, discardLog))
	}()
	if got := receive(t, systemd); got != "READY=1" {
		t.Errorf("first message %q", got)
	}
	if v := runtimeVersion(t, path); v != "1.2.3" {
		t.Errorf("version %s", v)
	}
	cancel()
	if got := receive(t, systemd); got != "STOPPING=1" {
		t.Errorf("second message %q", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket: %v", err)
	}
	if err := ignoreClosed(listener.Close()); err != nil {
		t.Error(err)
	}
}

func receive(t *testing.T, conn *net.UnixConn) string {
	t.Helper()
	buf := make([]byte, 256)
	n, err := conn.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return string(buf[:n])
}

func runtimeVersion(t *testing.T, path string) string {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	resp, err := runtimeapi.NewRuntimeServiceClient(conn).Version(t.Context(), &runtimeapi.VersionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return resp.RuntimeVersion
}

// TestSocketActivation runs TestActivated in a process that gets sockets the way systemd passes
// them.
func TestSocketActivation(t *testing.T) {
	dir := t.TempDir()
	unixSocket := func(name string) *os.File {
		l, err := net.Listen("unix", filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		f, err := l.(*net.UnixListener).File()
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	tcpFile, err := tcp.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	regular, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(dir, "own")
	for name, tc := range map[string]struct {
		files []*os.File
		want  string
	}{
		"none":    {nil, "listens on " + own},
		"one":     {[]*os.File{unixSocket("a")}, "listens on " + filepath.Join(dir, "a")},
		"two":     {[]*os.File{unixSocket("b"), unixSocket("c")}, "error: systemd passed 2 sockets, want one"},
		"tcp":     {[]*os.File{tcpFile}, "error: the socket from systemd is not a unix stream socket"},
		"no sock": {[]*os.File{regular}, "error: the socket from systemd is not a unix stream socket"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestActivated$", "-test.v")
			cmd.Env = append(os.Environ(), "BERTH_TEST_LISTEN="+own, fmt.Sprintf("LISTEN_FDS=%d", len(tc.files)))
			cmd.ExtraFiles = tc.files
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.Contains(string(out), tc.want+"\n") {
				t.Errorf("%v, want %q in\n%s", err, tc.want, out)
			}
			if name == "one" {
				if _, err := os.Lstat(filepath.Join(dir, "a")); err != nil {
					t.Errorf("systemd's socket is gone: %v", err)
				}
			}
		})
		for _, f := range tc.files {
			f.Close()
		}
	}
}

func TestActivated(t *testing.T) {
	own := os.Getenv("BERTH_TEST_LISTEN")
	if own == "" {
		return // only for the process that TestSocketActivation starts
	}
	os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid()))
	l, err := listen(own)
	if err != nil {
		fmt.Printf("error: %v\n", err)
		return
	}
	if left := os.Getenv("LISTEN_FDS"); left != "" {
		t.Errorf("children would inherit LISTEN_FDS=%s", left)
	}
	fmt.Printf("listens on %s\n", l.Addr())
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestLoggerFollowsConfiguration(t *testing.T) {
	for _, tc := range []struct{ level, format, want string }{
		{"info", "text", "level=INFO msg=i pod=p\n"},
		{"debug", "text", "level=DEBUG msg=d pod=p\nlevel=INFO msg=i pod=p\n"},
		{"error", "text", ""},
		{"info", "json", `"level":"INFO","msg":"i","pod":"p"}` + "\n"},
	} {
		var out bytes.Buffer
		log := newLogger(&config.Config{LogLevel: tc.level, LogFormat: tc.format}, new(slog.LevelVar), &out, new(sandbox.Names).Of)
		log.Debug("d", "pod", "p")
		log.Info("i", "pod", "p")
		got := regexp.MustCompile(`time=\S+ |{"time":"[^"]+",`).ReplaceAllString(out.String(), "")
		if got != tc.want {
			t.Errorf("%s, %s: %q, want %q", tc.level, tc.format, got, tc.want)
		}
	}
}

// The daemon must survive a log without a reader.
func TestDaemonSurvivesBrokenLogPipe(t *testing.T) {
	if os.Getenv("BERTH_TEST_PIPE") != "" {
		setUpProcess()
		if _, err := os.Stderr.WriteString("x"); !errors.Is(err, unix.EPIPE) {
			os.Exit(3)
		}
		os.Exit(42)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestDaemonSurvivesBrokenLogPipe$")
	cmd.Env, cmd.Stderr = append(os.Environ(), "BERTH_TEST_PIPE=1"), w
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != 42 {
		t.Errorf("the process ended with %v", err)
	}
	w.Close()
}

func TestExampleNetworkIsValid(t *testing.T) {
	list, err := libcni.NetworkConfFromFile("../../../contrib/cni/10-berth.conflist")
	if err != nil {
		t.Fatal(err)
	}
	if list.Name != "berth" || len(list.Plugins) != 2 || !list.Plugins[1].Network.Capabilities["portMappings"] {
		t.Errorf("%+v", list)
	}
}

// noPods is a sandbox manager without pods, for requests that do not need it.
type noPods struct{ server.Sandboxes }

func (noPods) Events() *state.Queue[state.Event] { return state.NewQueue[state.Event]() }
