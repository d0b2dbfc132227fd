package commands

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// asBerth makes the test binary run `berth` with its arguments.
const asBerth = "BERTH_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asBerth) == "" {
		os.Exit(m.Run())
	}
	fmt.Fprintln(os.Stderr, "berth:", Root().ExecuteContext(context.Background()))
	os.Exit(1)
}

// programBerth returns the path of a program that is berth, in a directory of its own.
func programBerth(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	testutil.Must(t, err)
	content, err := os.ReadFile(self)
	testutil.Must(t, err)
	path := filepath.Join(t.TempDir(), "berth")
	testutil.Must(t, os.WriteFile(path, content, 0o700))
	return path
}

// fakeDaemon prints its process ID, limit of open files, arguments, environment and descriptor 3.
const fakeDaemon = `#!/bin/sh
echo $$
ulimit -Sn
echo "$0 $*"
echo "$NOTIFY_SOCKET"
cat <&3
`

// systemd knows a service by its process ID, and passes it sockets as descriptors.
func TestServeExecutesDaemonBesideBerth(t *testing.T) {
	berth := programBerth(t)
	program := filepath.Join(filepath.Dir(berth), "berthd")
	testutil.Must(t, os.WriteFile(program, []byte(fakeDaemon), 0o700))
	passed := filepath.Join(filepath.Dir(berth), "passed")
	testutil.Must(t, os.WriteFile(passed, []byte("a socket\n"), 0o600))
	file, err := os.Open(passed)
	testutil.Must(t, err)
	defer file.Close()
	// A shell sets the limit of open files, because exec.Cmd cannot.
	cmd := exec.Command("sh", "-c", `ulimit -Sn 123 && exec "$0" "$@"`, berth, "serve", "--config", "/a b", "--help", "x")
	cmd.Env = append(os.Environ(), asBerth+"=1", "NOTIFY_SOCKET=/run/notify")
	cmd.ExtraFiles = []*os.File{file}
	out, err := cmd.CombinedOutput()
	want := fmt.Sprintf("%d\n123\n%s --config /a b --help x\n/run/notify\na socket\n", cmd.Process.Pid, program)
	if err != nil || string(out) != want {
		t.Errorf("%v, %s, want %s", err, out, want)
	}
}

func TestServeFindsNoDaemonInPath(t *testing.T) {
	berth, other := programBerth(t), t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(other, "berthd"), []byte(fakeDaemon), 0o700))
	cmd := exec.Command(berth, "serve")
	cmd.Env = append(os.Environ(), asBerth+"=1", "PATH="+other+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	want := "berth: execute the daemon " + filepath.Join(filepath.Dir(berth), "berthd") + ", which must be beside berth: no such file or directory\n"
	if err == nil || !strings.HasSuffix(string(out), want) {
		t.Errorf("%v, %s, want %s", err, out, want)
	}
}
