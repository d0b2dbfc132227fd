package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"

	"berth/integration/harness"
	"berth/integration/machine"
)

func TestExecSync(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t, harness.Env("FROM", "config"), harness.RunAs(1001), func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/www" })
	stdout, stderr, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "echo out; echo err >&2; exit 7"}, 0)
	harness.Equal(t, "exit code", harness.ExitCode(err), 7)
	harness.Equal(t, "stdout", string(stdout), "out\n")
	harness.Equal(t, "stderr", string(stderr), "err\n")
	harness.Equal(t, "environment, directory and user", c.Exec(t, "sh", "-c", "echo $FROM $(pwd) $(id -u)"), "config /www 1001")
	harness.Equal(t, "stdin", c.Exec(t, "cat"), "")
	_, _, err = d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", "kill -9 $$"}, 0)
	if harness.ExitCode(err) != 137 {
		t.Errorf("a command that was killed: %v, want exit code 137", err)
	}
}

// kubelet runs postStart hooks as soon as StartContainer returns.
func TestExecRightAfterStart(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for range 5 {
		c := pod.Run(t)
		harness.Equal(t, "output", c.Exec(t, "echo", "hook"), "hook")
		c.Stop(t, 0)
	}
}

// At its timeout, an exec's command is killed with everything that it started.
func TestExecSyncTimeoutKillsGrandchildren(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	const script = "trap '' TERM; sleep 7771 & (setsid sleep 7772 &) ; echo started; sleep 7773"
	_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", script}, time.Second)
	if !errors.Is(err, cri.ErrCommandTimedOut) { // cri-client's form of DeadlineExceeded
		t.Errorf("the error is %v, want DeadlineExceeded", err)
	}
	awaitNoProcesses(t, "sleep 777", "sh -c trap")
	harness.Equal(t, "output of a later exec", c.Exec(t, "echo", "alive"), "alive")
}

// awaitNoProcesses waits until no command line of a process begins with one of these prefixes.
func awaitNoProcesses(t *testing.T, prefixes ...string) {
	t.Helper()
	harness.Eventually(t, "no process is left", func() error {
		for _, prefix := range prefixes {
			if left := machine.CommandLines(prefix); len(left) > 0 {
				return fmt.Errorf("still running: %q", left)
			}
		}
		return nil
	})
}

// A background process that holds stdout does not delay the answer.
func TestExecSyncReturnsWhileChildHoldsStdout(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	harness.Equal(t, "output", c.Exec(t, "sh", "-c", "sleep 8881 & echo done"), "done")
	c.Stop(t, 0)
	if left := machine.CommandLines("sleep 8881"); len(left) > 0 {
		t.Errorf("still running after the container's end: %q", left)
	}
}

// ExecSync returns at most 16 MiB of each stream. It drops the rest without an error.
func TestExecSyncOutputCap(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	const limit = 16 << 20
	response, err := harness.RawRuntime(t, d).ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.Id, Cmd: []string{"sh", "-c", "head -c 20000000 /dev/zero; echo end >&2"}})
	harness.Must(t, err)
	if n := len(response.Stdout); n > limit || n < limit-1<<20 {
		t.Errorf("got %d bytes of stdout, want 16 MiB or a little less", n)
	}
	harness.Equal(t, "stderr", string(response.Stderr), "end\n")
	harness.Equal(t, "exit code", response.ExitCode, 0)
}

// An exec's processes are in a cgroup below the container's and are killed with the container.
func TestExecIsKilledWithContainer(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	result := harness.Go(func() error { _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sleep", "9991"}, 0); return err })
	harness.EventuallyTrue(t, "the command runs", func() bool { return len(machine.CommandLines("sleep 9991")) > 0 })
	c.Stop(t, 0)
	if err := <-result; harness.ExitCode(err) != 137 && harness.CodeOf(err) == codes.OK {
		t.Errorf("ExecSync in a container that is being killed: %v", err)
	}
}

func TestManyExecsAtOnce(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	const n = 20
	errs := make(chan error, n)
	for i := range n {
		go func() {
			stdout, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"echo", fmt.Sprint(i)}, time.Minute)
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
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	running, created := pod.Run(t), pod.Create(t)
	exited, _ := pod.RunToEnd(t, harness.Command("true"))
	runtime := harness.RawRuntime(t, d)
	for _, c := range []struct {
		name string
		req  *runtimeapi.ExecSyncRequest
		code codes.Code
		says string
	}{
		{"unknown container", &runtimeapi.ExecSyncRequest{ContainerId: "feedfacefeed", Cmd: []string{"true"}}, codes.NotFound, "feedfacefeed"},
		{"created container", &runtimeapi.ExecSyncRequest{ContainerId: created.Id, Cmd: []string{"true"}}, codes.FailedPrecondition, created.Id},
		{"exited container", &runtimeapi.ExecSyncRequest{ContainerId: exited.Id, Cmd: []string{"true"}}, codes.FailedPrecondition, exited.Id},
		{"no command", &runtimeapi.ExecSyncRequest{ContainerId: running.Id}, codes.InvalidArgument, "cmd"},
		{"NUL byte", &runtimeapi.ExecSyncRequest{ContainerId: running.Id, Cmd: []string{"echo", "a\x00b"}}, codes.InvalidArgument, "NUL"},
		{"negative timeout", &runtimeapi.ExecSyncRequest{ContainerId: running.Id, Cmd: []string{"true"}, Timeout: -1}, codes.InvalidArgument, "timeout"},
	} {
		_, err := runtime.ExecSync(t.Context(), c.req)
		t.Run(c.name, func(t *testing.T) { harness.WantCode(t, err, c.code, c.says) })
	}
	// A missing command causes either the shell's exit code or an error with its name.
	_, _, err := d.Cri.ExecSync(t.Context(), running.Id, []string{"/no/such/command"}, 0)
	if err == nil || !strings.Contains(err.Error(), "/no/such/command") {
		t.Errorf("the error does not name the command: %v", err)
	}
}

// Each error names the container exactly once.
func TestErrorsNameContainerOnce(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	running := pod.Run(t)
	exited, _ := pod.RunToEnd(t, harness.Command("true"))
	bad := pod.Create(t, harness.Command("/no/such/program"))
	for name, try := range map[string]func() (id string, err error){
		"exec of a missing program": func() (string, error) {
			_, _, err := d.Cri.ExecSync(t.Context(), running.Id, []string{"/no/such/program"}, 0)
			return running.Id, err
		},
		"exec in an exited container": func() (string, error) {
			_, _, err := d.Cri.ExecSync(t.Context(), exited.Id, []string{"true"}, 0)
			return exited.Id, err
		},
		"start of a missing program": func() (string, error) { return bad.Id, d.Cri.StartContainer(t.Context(), bad.Id) },
	} {
		id, err := try()
		t.Run(name, func(t *testing.T) { harness.WantOnce(t, err, id) })
	}
}

// A user other than root has only ambient capabilities, in init and in execs.
func TestAmbientCapabilities(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for ambient, want := range map[string]string{"": "0000000000000000", "NET_BIND_SERVICE": "0000000000000400"} {
		c := pod.Run(t, harness.RunAs(1001), harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			if ambient != "" {
				s.Capabilities.AddAmbientCapabilities = []string{ambient}
			}
		}))
		for _, set := range []string{"CapEff", "CapPrm", "CapAmb", "CapInh"} {
			harness.Equal(t, fmt.Sprintf("init's %s with %q", set, ambient), machine.StatusField(t, c.Pid(t), set), want)
			harness.Equal(t, fmt.Sprintf("an exec's %s with %q", set, ambient),
				strings.TrimSpace(strings.TrimPrefix(c.Exec(t, "grep", set, "/proc/self/status"), set+":")), want)
		}
	}
}

// Clients cannot run more commands at a time than the configuration allows. When commands end, new
// ones can run.
func TestTooManyExecs(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig("exec.max = 3", "exec.max_per_container = 2"))
	pod := d.RunPod(t, harness.HostNetwork)
	first, second := pod.Run(t), pod.Run(t)
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	for i, c := range []*harness.Container{first, first, second} {
		begun := fmt.Sprintf("/begun%d", i)
		running.Go(func() {
			_, _, _ = d.Cri.ExecSync(ctx, c.Id, []string{"sh", "-c", "touch " + begun + "; sleep 1000"}, 0)
		})
		harness.Eventually(t, "the command runs", func() error {
			_, err := os.Stat(filepath.Join(fmt.Sprintf("/proc/%d/root", c.Pid(t)), begun))
			return err
		})
		if i == 1 {
			_, _, err := d.Cri.ExecSync(t.Context(), first.Id, []string{"true"}, 0)
			harness.WantCode(t, err, codes.ResourceExhausted, first.Id, "its limit of 2 execs")
		}
	}
	_, _, err := d.Cri.ExecSync(t.Context(), second.Id, []string{"true"}, 0)
	harness.WantCode(t, err, codes.ResourceExhausted, second.Id, "limit of 3 execs")
	cancel()
	running.Wait()
	harness.Eventually(t, "new commands can run", func() error {
		_, _, err := d.Cri.ExecSync(t.Context(), first.Id, []string{"true"}, 0)
		return err
	})
}
