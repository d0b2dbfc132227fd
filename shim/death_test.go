package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/proto"
)

// The test binary is also a daemon, which launches one container and waits until it is killed.
func init() {
	if len(os.Args) == 2 && os.Args[1] == "daemon" {
		os.Exit(daemon())
	}
}

// daemonInput is the daemon's standard input.
type daemonInput struct {
	Config  Config
	Request *proto.Launch
}

func daemon() int {
	var in daemonInput
	err := json.NewDecoder(os.Stdin).Decode(&in)
	if err == nil {
		var l *Launchers
		if l, err = New(in.Config); err == nil {
			_, err = l.Launch(context.Background(), in.Request)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("launched")
	select {}
}

// TestDaemonDiesDuringLaunch kills a daemon at several points of a launch. Afterwards either the
// container runs and has its record and monitor, or nothing is left of it.
func TestDaemonDiesDuringLaunch(t *testing.T) {
	for _, point := range []struct{ name, file string }{
		{"rootfs", "c/rootfs"},
		{"socket", "c/sock"},
		{"shim record", "c/shim"},
		{"state directory", "libcontainer/c"},
		{"exec fifo", "libcontainer/c/exec.fifo"},
		{"state", "libcontainer/c/state.json"},
		{"log", "c/log"},
		{"launched", ""},
	} {
		t.Run(point.name, func(t *testing.T) {
			e := newEnv(t, func(c *Config) { c.Idle = 0 }) // no launchers besides the daemon's
			running := e.killDaemon(point.file)
			t.Logf("the container is running: %v", running)
			if point.file == "" && !running {
				t.Error("the container did not survive the daemon")
			}
		})
	}
}

// killDaemon runs a daemon that launches container "c". It kills the daemon when a file exists, or
// after the launch. It checks the result and returns whether the container runs.
func (e *env) killDaemon(file string) (running bool) {
	e.Helper()
	in := daemonInput{Config: e.cfg, Request: e.request("c", "exec sleep 1000")}
	in.Config.Idle, in.Config.Log = 1, nil
	input, err := json.Marshal(in)
	if err != nil {
		e.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "daemon")
	cmd.Stdin = strings.NewReader(string(input))
	cmd.Stderr = e.Output()
	out, err := cmd.StdoutPipe()
	if err != nil {
		e.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		e.Fatal(err)
	}
	if file == "" {
		if _, err := out.Read(make([]byte, 16)); err != nil {
			e.Fatal(err)
		}
	} else {
		exists := func(name string) bool { return unix.Access(filepath.Join(e.dir, name), unix.F_OK) == nil }
		// The FIFO exists for some milliseconds only. The log is created later and stays.
		e.until(file+" exists", func() bool { return exists(file) || exists("c/log") })
	}
	if err := cmd.Process.Kill(); err != nil {
		e.Fatal(err)
	}
	_ = cmd.Wait() // killed
	running = e.outcome(in.Request)
	e.awaitNoLaunchers()
	return running
}

// outcome checks the container and the files that a dead daemon has left, and removes them.
func (e *env) outcome(req *proto.Launch) (running bool) {
	e.Helper()
	e.awaitNoLaunchers()
	rec, err := ReadShim(req.Dir)
	if err != nil {
		e.nothingLeft(req)
		return false
	}
	if rec.InitPID == 0 {
		// The daemon recorded the launcher and died before it sent the launch request. The next
		// daemon removes the record.
		if err := os.Remove(filepath.Join(req.Dir, proto.ShimFile)); err != nil {
			e.Fatal(err)
		}
		e.nothingLeft(req)
		return false
	}
	init, err := pidfd.OpenVerified(rec.InitPID, rec.InitStartTime)
	if err != nil {
		e.Fatalf("a record, but no container: %+v, %v", rec, err)
	}
	shim, err := pidfd.OpenVerified(rec.MonitorPID, rec.MonitorStartTime)
	if err != nil {
		e.Fatalf("a container, but no monitor: %+v, %v", rec, err)
	}
	c := &container{env: e, Launch: req, Started: &proto.Started{Init: init, Shim: shim, PIDs: rec}}
	if err := OpenMonitor(req.Dir).ReopenLog(e.ctx); err != nil {
		e.Error(err)
	}
	c.remove()
	if exit, err := ReadExit(req.Dir); err != nil || exit.Signal != int(unix.SIGKILL) {
		e.Errorf("exit record: %+v, %v", exit, err)
	}
	return true
}

// awaitNoLaunchers waits until a dead daemon's launchers are monitors or have exited. It reaps them
// meanwhile: this process is process 1.
func (e *env) awaitNoLaunchers() {
	e.Helper()
	e.until("launchers are monitors or have exited", func() bool {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if pid <= 0 && !errors.Is(err, unix.EINTR) {
				break
			}
		}
		return countLaunchers() == 0
	})
}

// countLaunchers includes starting launchers: before execve they have the daemon's arguments,
// within execve none. Zombies have none either and count, too.
func countLaunchers() int {
	n := 0
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		args, err := os.ReadFile(f)
		if err == nil && (len(args) == 0 || bytes.HasPrefix(args, []byte("berth-shim\x00launcher")) || bytes.HasSuffix(args, []byte("\x00daemon\x00"))) {
			n++
		}
	}
	return n
}
