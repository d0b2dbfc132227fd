package shim

import (
	"os/signal"
	"strings"
	"testing"

	"berth/shim/proto"
	"golang.org/x/sys/unix"
)

// A daemon started by nohup, or in the background by a script, ignores signals that
// workloads must get: STOPSIGNAL SIGINT, reload by SIGHUP.
func TestContainersIgnoreNoSignals(t *testing.T) {
	signal.Ignore(unix.SIGHUP, unix.SIGINT)
	defer signal.Reset(unix.SIGHUP, unix.SIGINT)
	e := newEnv(t)
	c := e.run("signals", "", func(r *proto.Launch) { // not by busybox's shell, which ignores SIGQUIT
		r.Spec.Process.Args = []string{"/bin/busybox", "grep", "SigIgn", "/proc/self/status"}
	})
	c.wait()
	if log := c.log(); !strings.Contains(log, "SigIgn:\t0000000000000000\n") {
		t.Errorf("the container ignores signals: %q", log)
	}
}
