package integration

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"
)

func TestExecSync(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t, env("FROM", "config"), runAs(1001), func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/www" })
	stdout, stderr, err := d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", "echo out; echo err >&2; exit 7"}, 0)
	equal(t, "exit code", exitCode(err), 7)
	equal(t, "stdout", string(stdout), "out\n")
	equal(t, "stderr", string(stderr), "err\n")
	equal(t, "environment, directory and user", c.exec(t, "sh", "-c", "echo $FROM $(pwd) $(id -u)"), "config /www 1001")
	equal(t, "stdin", c.exec(t, "cat"), "")
	_, _, err = d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", "kill -9 $$"}, 0)
	if exitCode(err) != 137 {
		t.Errorf("a command that was killed: %v, want exit code 137", err)
	}
}

// kubelet runs postStart hooks the moment StartContainer returns.
func TestExecRightAfterStart(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	for range 5 {
		c := pod.run(t)
		equal(t, "output", c.exec(t, "echo", "hook"), "hook")
		c.stop(t, 0)
	}
}

// A timeout ends the command and everything it has started.
func TestExecSyncTimeoutKillsGrandchildren(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	const script = "trap '' TERM; sleep 7771 & (setsid sleep 7772 &) ; echo started; sleep 7773"
	_, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"sh", "-c", script}, time.Second)
	if !errors.Is(err, cri.ErrCommandTimedOut) { // cri-client's word for DeadlineExceeded
		t.Errorf("the error is %v, want DeadlineExceeded", err)
	}
	eventually(t, "everything it started is gone", func() error {
		if left := append(commandLines("sleep 777"), commandLines("sh -c trap")...); len(left) > 0 {
			return fmt.Errorf("still running: %q", left)
		}
		return nil
	})
	equal(t, "the container goes on", c.exec(t, "echo", "alive"), "alive")
}

// A background process that holds stdout does not hold up the answer.
func TestExecSyncReturnsWhileChildHoldsStdout(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	equal(t, "output", c.exec(t, "sh", "-c", "sleep 8881 & echo done"), "done")
	c.stop(t, 0)
	if left := commandLines("sleep 8881"); len(left) > 0 {
		t.Errorf("still running after the container's end: %q", left)
	}
}

// Of each stream 16 MiB are returned, the rest is dropped without an error.
func TestExecSyncOutputCap(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	const limit = 16 << 20
	response, err := rawRuntime(t, d).ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.id, Cmd: []string{"sh", "-c", "head -c 20000000 /dev/zero; echo end >&2"}})
	must(t, err)
	if n := len(response.Stdout); n > limit || n < limit-1<<20 {
		t.Errorf("got %d bytes of stdout, want 16 MiB or a little less", n)
	}
	equal(t, "stderr", string(response.Stderr), "end\n")
	equal(t, "exit code", response.ExitCode, 0)
}

// Processes of an exec are in a cgroup below the container's, and die with it.
func TestExecSyncDiesWithContainer(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	result := make(chan error, 1)
	go func() {
		_, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"sleep", "9991"}, 0)
		result <- err
	}()
	eventually(t, "the command runs", func() error {
		if len(commandLines("sleep 9991")) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	c.stop(t, 0)
	if err := <-result; exitCode(err) != 137 && codeOf(err) == codes.OK {
		t.Errorf("ExecSync in a container that ended: %v", err)
	}
}

func TestManyExecsAtOnce(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	const n = 20
	errs := make(chan error, n)
	for i := range n {
		go func() {
			stdout, _, err := d.cri.ExecSync(t.Context(), c.id, []string{"echo", fmt.Sprint(i)}, time.Minute)
			if err == nil && string(stdout) != fmt.Sprintf("%d\n", i) {
				err = fmt.Errorf("command %d wrote %q", i, stdout)
			}
			errs <- err
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestExecSyncErrors(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	running, created := pod.run(t), pod.create(t)
	exited, _ := pod.runToEnd(t, command("true"))
	runtime := rawRuntime(t, d)
	for _, c := range []struct {
		name string
		req  *runtimeapi.ExecSyncRequest
		code codes.Code
		says string
	}{
		{"unknown container", &runtimeapi.ExecSyncRequest{ContainerId: "feedfacefeed", Cmd: []string{"true"}}, codes.NotFound, "feedfacefeed"},
		{"created container", &runtimeapi.ExecSyncRequest{ContainerId: created.id, Cmd: []string{"true"}}, codes.FailedPrecondition, created.id},
		{"exited container", &runtimeapi.ExecSyncRequest{ContainerId: exited.id, Cmd: []string{"true"}}, codes.FailedPrecondition, exited.id},
		{"no command", &runtimeapi.ExecSyncRequest{ContainerId: running.id}, codes.InvalidArgument, "cmd"},
		{"negative timeout", &runtimeapi.ExecSyncRequest{ContainerId: running.id, Cmd: []string{"true"}, Timeout: -1}, codes.InvalidArgument, "timeout"},
	} {
		_, err := runtime.ExecSync(t.Context(), c.req)
		t.Run(c.name, func(t *testing.T) { wantCode(t, err, c.code, c.says) })
	}
	// A command that does not exist is a result, not a failure of the runtime, where the shell's
	// convention is kept; or an error that names it.
	_, _, err := d.cri.ExecSync(t.Context(), running.id, []string{"/no/such/command"}, 0)
	if err == nil || !strings.Contains(err.Error(), "/no/such/command") {
		t.Errorf("the error does not name the command: %v", err)
	}
}

// A user other than root has no capability but the ambient ones: init, and what is executed later.
func TestAmbientCapabilities(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	for ambient, want := range map[string]string{"": "0000000000000000", "NET_BIND_SERVICE": "0000000000000400"} {
		c := pod.run(t, runAs(1001), security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			if ambient != "" {
				s.Capabilities.AddAmbientCapabilities = []string{ambient}
			}
		}))
		for _, set := range []string{"CapEff", "CapPrm", "CapAmb", "CapInh"} {
			equal(t, fmt.Sprintf("init's %s with %q", set, ambient), statusField(t, c.pid(t), set), want)
			equal(t, fmt.Sprintf("an exec's %s with %q", set, ambient),
				strings.TrimSpace(strings.TrimPrefix(c.exec(t, "grep", set, "/proc/self/status"), set+":")), want)
		}
	}
}
