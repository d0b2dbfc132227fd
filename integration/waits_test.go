package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/moody"
)

// waitInfo is an entry of "waits" in verbose Status.
type waitInfo struct {
	What, Object          string
	Seconds, LimitSeconds float64
	Overdue               bool
}

// passesLimit waits until verbose Status shows a wait for an object as overdue, with its age and limit, and the
// log has it, with the stacks of all goroutines.
func passesLimit(t *testing.T, d *harness.Daemon, what, object string) {
	t.Helper()
	harness.Eventually(t, "a wait for "+what+" passes its limit", func() error {
		info := harness.Get(d.Cri.Status(t.Context(), true))(t).Info
		var waits []waitInfo
		harness.Must(t, json.Unmarshal([]byte(info["waits"]), &waits))
		for _, w := range waits {
			if w.What == what && w.Object == object && w.Overdue && w.Seconds > w.LimitSeconds && w.LimitSeconds == 1 {
				return nil
			}
		}
		return fmt.Errorf("waits are %s", info["waits"])
	})
	harness.Eventually(t, "the wait is logged", func() error {
		logged := false
		for _, line := range machine.ReadLines(d.LogFile()) {
			logged = logged || strings.Contains(line, "a wait has passed its limit") && strings.Contains(line, strconv.Quote(what)) && strings.Contains(line, object) &&
				strings.Contains(line, "limit=1s") && strings.Contains(line, "goroutine ")
		}
		if !logged {
			return fmt.Errorf("the log has no line of %s with stacks:\n%s", what, d.Tail())
		}
		return nil
	})
	if n := harness.Get(d.Cri.Status(t.Context(), true))(t).Info["waitsPastLimit"]; n == "" || n == "0" {
		t.Errorf("verbose Status counts %q waits past their limits", n)
	}
}

const shortWaits = `wait_limit = "1s"`

// A wait for the end of a container whose shim is frozen passes its limit, and ends when the shim is killed.
func TestWaitForFrozenShim(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(shortWaits))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	harness.Must(t, syscall.Kill(harness.MonitorOf(t, d, c), syscall.SIGSTOP))
	ended := make(chan error, 1)
	go func() { ended <- d.Cri.StopContainer(t.Context(), c.Id, 0) }()
	passesLimit(t, d, "its end after SIGKILL", "container "+c.Id)
	harness.Must(t, <-ended)
}

// So does one for a CNI plugin that hangs, until it is killed.
func TestWaitForHungPlugin(t *testing.T) {
	plugin := moody.NewPlugin(t, "portmap")
	d := harness.StartDaemon(t, harness.WithConfig(shortWaits), plugin.Option)
	plugin.Is(t, "ADD", moody.Hang)
	config, ended := d.PodConfig(t), make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { _, err := d.Cri.RunPodSandbox(ctx, config, ""); ended <- err }()
	plugin.AwaitChildren(t, 0)
	records := func() []string { return machine.ReadDir(filepath.Join(d.Root, "pods")) }
	id := strings.TrimSuffix(records()[0], ".record")
	passesLimit(t, d, "CNI ADD", "pod "+id)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), id)) // unknown: it was never made
	for _, line := range []string{"sleep 100000", "sleep 100001"} {
		for _, pid := range machine.ProcessesOf(line) {
			machine.KillProcess(t, pid)
		}
	}
	if err := <-ended; err == nil {
		t.Error("the pod runs, though the plugin was killed")
	}
}

// systemd hears READY, then WATCHDOG as long as the daemon answers at its socket, and STOPPING.
func TestSystemdWatchdog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	systemd := harness.Get(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"}))(t)
	defer systemd.Close()
	d := harness.StartDaemon(t, harness.WithEnv("NOTIFY_SOCKET="+path, "WATCHDOG_USEC=1500000", "WATCHDOG_PID="))
	next := func() string {
		harness.Must(t, systemd.SetReadDeadline(time.Now().Add(harness.Patience)))
		message := make([]byte, 100)
		return string(message[:harness.Get(systemd.Read(message))(t)])
	}
	harness.Equal(t, "first message", next(), "READY=1")
	for range 3 {
		harness.Equal(t, "next message", next(), "WATCHDOG=1")
	}
	harness.Must(t, os.Rename(d.Socket, d.Socket+".away"))
	harness.Eventually(t, "the daemon finds that it is not well", func() error {
		if !strings.Contains(d.Tail(), "the daemon is not well") {
			return fmt.Errorf("its log does not say so")
		}
		return nil
	})
	harness.Must(t, os.Rename(d.Socket+".away", d.Socket))
	for next() != "WATCHDOG=1" { // those before it was not well
		t.Error("another message than WATCHDOG=1")
	}
	d.Stop(t)
	for message := next(); message != "STOPPING=1"; message = next() {
		harness.Equal(t, "message before the last", message, "WATCHDOG=1")
	}
	d.Start(t)
}
