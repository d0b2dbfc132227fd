package shim

import (
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

// The test binary is also a daemon that launches one container and then waits to
// be killed.
func init() {
	if len(os.Args) == 2 && os.Args[1] == "daemon" {
		os.Exit(daemon())
	}
}

type daemonOrder struct {
	Config  Config
	Request *proto.Launch
}

func daemon() int {
	var order daemonOrder
	if err := json.NewDecoder(os.Stdin).Decode(&order); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	l, err := New(order.Config)
	if err == nil {
		_, err = l.Launch(context.Background(), order.Request)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("launched")
	select {}
}

// TestDaemonDiesDuringLaunch kills a daemon at several points of a launch. Either
// the container runs then and everything says so, or nothing is left.
func TestDaemonDiesDuringLaunch(t *testing.T) {
	e := newEnv(t)
	e.until("its own launcher is there", func() bool { return countCommand("berth-shim\x00launcher") == 1 })
	for i, point := range []struct{ name, file string }{
		{"rootfs", "c/rootfs"},
		{"socket", "c/sock"},
		{"shim record", "c/shim"},
		{"state directory", "libcontainer/c"},
		{"exec fifo", "libcontainer/c/exec.fifo"},
		{"state", "libcontainer/c/state.json"},
		{"log", "c/log"},
		{"the end", ""},
	} {
		dir := filepath.Join(e.dir, itoa(i))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		running := e.killDaemon(dir, point.file)
		t.Logf("killed at %s: the container is running: %v", point.name, running)
		if point.file == "" && !running {
			t.Error("the container did not survive the daemon")
		}
	}
}

// killDaemon runs a daemon that launches container "c" in dir. It kills the daemon when a file
// exists, checks what is left and returns whether the container runs.
func (e *env) killDaemon(dir, file string) (running bool) {
	e.Helper()
	sub := &env{T: e.T, ctx: e.ctx, dir: dir, layer: e.layer, cfg: e.cfg}
	sub.cfg.StateRoot = filepath.Join(dir, "libcontainer")
	order := daemonOrder{Config: sub.cfg, Request: sub.request("c", "exec sleep 1000")}
	order.Config.Log = nil
	input, err := json.Marshal(order)
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
		exists := func(name string) bool { return unix.Access(filepath.Join(dir, name), unix.F_OK) == nil }
		// The FIFO is there for some milliseconds only; the log comes after it.
		e.until(file+" is there", func() bool { return exists(file) || exists("c/log") })
	}
	if err := cmd.Process.Kill(); err != nil {
		e.Fatal(err)
	}
	_ = cmd.Wait() // killed
	running = sub.outcome(order.Request)
	e.until("orphans are reaped", func() bool { reapOrphans(); return zombies() == 0 })
	return running
}

// outcome waits until the dead daemon's launchers are monitors or gone.
func (e *env) outcome(req *proto.Launch) (running bool) {
	e.Helper()
	e.until("launchers have come to an end", func() bool {
		reapOrphans()
		return countCommand("berth-shim\x00launcher") == 1 // the environment's own
	})
	rec, err := ReadShim(req.Dir)
	if err != nil {
		e.nothingLeft(req)
		return false
	}
	if rec.InitPID == 0 {
		// The daemon recorded the launcher and died before it sent the order. The next daemon
		// removes the record.
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
	shim, err := pidfd.OpenVerified(rec.ShimPID, rec.ShimStartTime)
	if err != nil {
		e.Fatalf("a container, but no monitor: %+v, %v", rec, err)
	}
	c := &container{env: e, Launch: req, Started: &proto.Started{Init: init, Shim: shim, Processes: rec}}
	if err := OpenMonitor(req.Dir).ReopenLog(e.ctx); err != nil {
		e.Error(err)
	}
	c.remove()
	if exit, err := ReadExit(req.Dir); err != nil || exit.Signal != int(unix.SIGKILL) {
		e.Errorf("exit record: %+v, %v", exit, err)
	}
	return true
}

// reapOrphans does what process 1 has to do: a dead daemon's children are ours. The
// pool's launchers are left alone; they are running.
func reapOrphans() {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if pid <= 0 && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

func zombies() int {
	n := 0
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, s := range stats {
		if data, err := os.ReadFile(s); err == nil && strings.Contains(string(data), ") Z ") {
			n++
		}
	}
	return n
}

func countCommand(prefix string) int {
	n := 0
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, l := range lines {
		if data, err := os.ReadFile(l); err == nil && strings.HasPrefix(string(data), prefix) {
			n++
		}
	}
	return n
}
