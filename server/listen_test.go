package server

import (
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

var discardLog = slog.New(slog.DiscardHandler)

func TestListenMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "dir", "s")
	l, err := Listen(path)
	testutil.Must(t, err)
	for p, want := range map[string]fs.FileMode{path: fs.ModeSocket | 0o600, filepath.Dir(path): fs.ModeDir | 0o700} {
		info, err := os.Stat(p)
		testutil.Must(t, err)
		if info.Mode() != want {
			t.Errorf("%s has mode %s, want %s", p, info.Mode(), want)
		}
	}
	testutil.Must(t, l.Close())
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket remains: %v", err)
	}
}

func TestListenReplacesStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale, err := net.Listen("unix", path)
	testutil.Must(t, err)
	stale.(*net.UnixListener).SetUnlinkOnClose(false) // like a killed daemon's
	stale.Close()
	l, err := Listen(path)
	testutil.Must(t, err)
	defer l.Close()
	conn, err := net.Dial("unix", path)
	testutil.Must(t, err)
	conn.Close()
}

func TestListenKeepsSocketInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	live, err := net.Listen("unix", path)
	testutil.Must(t, err)
	defer live.Close()
	if _, err := Listen(path); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d serves it", os.Getpid())) {
		t.Errorf("a socket in use: %v", err)
	}
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the live socket was removed: %v", err)
	}
	conn.Close()

	file := filepath.Join(t.TempDir(), "file")
	testutil.Must(t, os.WriteFile(file, []byte("precious"), 0o600))
	link := filepath.Join(t.TempDir(), "link")
	testutil.Must(t, os.Symlink(path, link))
	for _, p := range []string{file, link} {
		if _, err := Listen(p); err == nil || !strings.Contains(err.Error(), "is not a socket") {
			t.Errorf("%s: %v", p, err)
		}
		if _, err := os.Lstat(p); err != nil {
			t.Error(err)
		}
	}
}

func TestListenDatagramSocketIsNotStale(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	testutil.Must(t, err)
	defer conn.Close()
	if _, err := Listen(path); err == nil || !strings.Contains(err.Error(), unix.EPROTOTYPE.Error()) {
		t.Errorf("a datagram socket in use: %v", err)
	}
}

func TestListenForRootRefusesOtherUsers(t *testing.T) {
	testutil.NeedRoot(t)
	dir, err := os.MkdirTemp("/tmp", "root-only")
	testutil.Must(t, err)
	defer os.RemoveAll(dir)
	testutil.Must(t, os.Chmod(dir, 0o755))
	path := filepath.Join(dir, "s")
	l, err := ListenForRoot(path, discardLog)
	testutil.Must(t, err)
	defer l.Close()
	testutil.Must(t, os.Chmod(path, 0o666))
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("welcome")) // the client checks it
			conn.Close()
		}
	}()
	for _, c := range []struct {
		uid  int
		want string
	}{{65534, ""}, {0, "welcome"}} {
		conn, err := dialAs(c.uid, path)
		testutil.Must(t, err)
		if got, _ := io.ReadAll(conn); string(got) != c.want { // a refused client may get ECONNRESET
			t.Errorf("user %d got %q, want %q", c.uid, got, c.want)
		}
		conn.Close()
	}
}
