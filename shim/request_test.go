package shim

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// gaveUp reports whether the watch has given up the launcher.
func (w *requestWatch) gaveUp() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unresponsive
}

// A launcher that replies just before it is given up is kept, and its next reply is awaited.
func TestLateReplyKeepsLauncher(t *testing.T) {
	conn, file, err := proto.ConnPair()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	theirs, err := proto.NewConn(file)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	if err := conn.Send(proto.Request{Kill: "x"}); err != nil {
		t.Fatal(err)
	}
	h := (&launcher{conn: conn}).watchRequest(time.Hour)
	h.mu.Lock()
	h.unresponsive = true // as if it had been frozen
	h.mu.Unlock()
	if err := conn.Interrupt(); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Receive(&proto.Reply{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one that reads nothing: %v", err)
	}
	if err := h.result(nil); err != nil { // as if the reply had been faster
		t.Errorf("one that has replied: %v", err)
	}
	if err := theirs.Send(proto.Reply{Exited: &proto.Exited{Code: 7}}); err != nil {
		t.Fatal(err)
	}
	var next proto.Reply
	if _, err := conn.Receive(&next); err != nil || next.Exited.Code != 7 {
		t.Errorf("the next reply is %+v: %v", next, err)
	}
}

// The daemon waits longer for a launcher that runs but gets no processor time than for a frozen
// one.
func TestSlowLauncher(t *testing.T) {
	cmd := exec.Command("sh", "-c", "while :; do :; done")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	conn, theirs, err := proto.ConnPair()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	defer theirs.Close()
	p := &launcher{conn: conn, pid: cmd.Process.Pid}
	w := p.watchRequest(time.Hour)
	if err := w.sent(conn.Send(proto.Request{Kill: "x"})); err != nil {
		t.Fatal(err)
	}
	for p.isFrozen() && t.Context().Err() == nil { // until it is executed
		time.Sleep(time.Millisecond)
	}
	if w.check(); w.gaveUp() {
		t.Error("a launcher that runs is given up")
	}
	w.begun = w.begun.Add(-slowOrderTimeout)
	if w.check(); !w.gaveUp() {
		t.Error("a launcher that runs is waited for for ever")
	}
	if err := w.result(os.ErrDeadlineExceeded); !errors.Is(err, errUnresponsive) {
		t.Error(err)
	}
}

// If the daemon is delayed between the start of the watch and the request, it keeps healthy
// launchers and still replaces frozen ones.
func TestLateOrderKeepsHealthyLauncher(t *testing.T) {
	cmd := exec.Command("sleep", "1000") // it sleeps and reads nothing, like a frozen launcher or one that has not been woken yet
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	conn, theirs, err := proto.ConnPair()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	defer theirs.Close()
	p := &launcher{conn: conn, pid: cmd.Process.Pid}
	for !p.isFrozen() && t.Context().Err() == nil { // until it sleeps
		time.Sleep(time.Millisecond)
	}
	w := p.watchRequest(time.Hour)
	w.check() // nothing was sent yet
	w.timer.Stop()
	if err := w.sent(conn.Send(proto.Request{Kill: "x"})); err != nil {
		t.Fatal(err)
	}
	w.check()
	if w.gaveUp() {
		t.Error("the daemon gave up a launcher that had its request only for a moment")
	}
	if _, err := conn.Receive(&proto.Reply{}); !errors.Is(err, os.ErrDeadlineExceeded) { // the next check is already scheduled
		t.Errorf("one that reads nothing: %v", err)
	}
	if err := w.result(os.ErrDeadlineExceeded); !errors.Is(err, errUnresponsive) {
		t.Error(err)
	}
}

// A launcher is frozen if it is stopped or its cgroup is frozen. It also counts as frozen if it
// sleeps although it has a request to read.
func TestIsFrozen(t *testing.T) {
	for name, freeze := range map[string]func(t *testing.T, pid int) (thaw func()){
		"stopped":   func(t *testing.T, pid int) func() { stop(t, pid); return func() {} },
		"by cgroup": freezeInCgroup,
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("sh", "-c", "while :; do :; done")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			proc, err := pidfd.Open(cmd.Process.Pid)
			if err != nil {
				t.Fatal(err)
			}
			p := &launcher{pid: cmd.Process.Pid, proc: proc}
			thaw := freeze(t, p.pid)
			for !p.isFrozen() {
				time.Sleep(time.Millisecond)
			}
			if err := p.killUnresponsive(); err != nil {
				t.Error(err)
			}
			thaw()
			if err := pidfd.Wait(t.Context(), proc); err != nil {
				t.Error(err)
			}
			_ = cmd.Wait() // it was reaped
			proc.Close()
		})
	}
}

func stop(t *testing.T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
}

// freezeInCgroup moves a process to a cgroup of its own and freezes that. The returned function
// thaws it. The cgroup is removed at the test's end.
func freezeInCgroup(t *testing.T, pid int) (thaw func()) {
	t.Helper()
	group, err := cgroup.Open(cgroupRoot+"/frozen-"+strconv.Itoa(pid), false)
	if err != nil {
		t.Fatal(err)
	}
	dir, file, frozen, thawed := group.Dir("freezer"), "freezer.state", "FROZEN", "THAWED"
	if v2 := group.Paths()[""]; v2 != "" {
		dir, file, frozen, thawed = v2, "cgroup.freeze", "1", "0"
	}
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0); err != nil {
			t.Error(err)
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write("cgroup.procs", strconv.Itoa(pid))
	write(file, frozen)
	t.Cleanup(func() {
		for err := unix.Rmdir(dir); err == unix.EBUSY; err = unix.Rmdir(dir) {
			time.Sleep(time.Millisecond)
		}
		_ = unix.Rmdir(filepath.Dir(dir)) // others may use it
	})
	return func() { write(file, thawed) }
}
