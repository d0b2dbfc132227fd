package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// StartContainer returns when the container's command runs. kubelet then runs postStart hooks at
// once, which may inspect process 1 or write to its output. An OCI hook extends the time between
// libcontainer's answer and execve.
func TestStartAnswersWhenCommandRuns(t *testing.T) {
	const base = 24 * usernsLength
	dir, option := cdiDir(t)
	writeCDI(t, filepath.Join(dir, "vendor.json"), map[string]any{
		"slow": map[string]any{"hooks": []any{map[string]any{"hookName": "startContainer", "path": "/bin/sleep", "args": []string{"sleep", "0.3"}}}},
	})
	d := harness.StartDaemon(t, option, harness.WithHandler("crun", harness.Crun(t)))
	seccomp := harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	})
	for _, test := range []struct {
		name, handler string
		pod           []harness.PodOption
		options       []harness.ContainerOption
	}{
		{"plain", "", []harness.PodOption{harness.HostNetwork}, nil},
		{"seccomp and another user", "", []harness.PodOption{harness.HostNetwork}, []harness.ContainerOption{seccomp, harness.RunAs(1000)}},
		{"terminal", "", []harness.PodOption{harness.HostNetwork}, []harness.ContainerOption{harness.WithTerminal}},
		{"shared PID namespace", "", []harness.PodOption{harness.SharedPID}, nil},
		{"user namespace", "", []harness.PodOption{userNamespace(base)}, []harness.ContainerOption{inUserNamespace(base)}},
		{"another runtime", "crun", []harness.PodOption{harness.HostNetwork}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := runPodWith(t, d, test.handler, test.pod...)
			c := pod.Run(t, append(test.options, harness.Cdi("slow"), harness.Command("sleep", "1000"))...)
			harness.Equal(t, "init's name", strings.Join(machine.ReadLines(fmt.Sprintf("/proc/%d/comm", c.InitPID(t))), ""), "sleep")
			if test.name != "shared PID namespace" {
				c.Exec(t, "sh", "-c", "grep -q sleep /proc/1/comm && echo hook >/proc/1/fd/1")
				c.WaitOutput(t, "hook")
			}
		})
	}
}

// If a pod is stopped while a start waits for the command, the start returns.
func TestStopEndsStartThatWaitsForCommand(t *testing.T) {
	dir, option := cdiDir(t)
	writeCDI(t, filepath.Join(dir, "vendor.json"), map[string]any{
		"hangs": map[string]any{"hooks": []any{map[string]any{"hookName": "startContainer", "path": "/bin/sleep", "args": []string{"sleep", "4242"}}}},
	})
	d := harness.StartDaemon(t, option)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t, harness.Cdi("hangs"))
	started := harness.Go(func() error { return d.Cri.StartContainer(context.Background(), c.Id) })
	harness.EventuallyTrue(t, "the hook runs", func() bool { return len(machine.CommandLines("sleep 4242")) > 0 })
	pod.Stop(t) // a StopContainer would wait ten seconds for the start
	harness.WantCode(t, <-started, codes.FailedPrecondition, c.Id)
	awaitNoProcesses(t, "sleep 4242")
	harness.Equal(t, "reason", c.WaitExited(t).Reason, "StartError")
	harness.Equal(t, "the next container", d.RunPod(t, harness.HostNetwork).Sh(t, "echo works"), "works\n")
}

// If execve refuses a command, StartContainer returns the error, because the container never ran.
func TestStartFailsWhenExecveFails(t *testing.T) {
	dir := machine.HostDir(t)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "garbage"), []byte("\x7fELF and no more"), 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "script"), []byte("#!/no/such/interpreter\n"), 0o755))
	volume := harness.Mount(&runtimeapi.Mount{ContainerPath: "/v", HostPath: dir, Readonly: true})
	for _, handler := range []string{"", "crun"} {
		t.Run("handler "+handler, func(t *testing.T) {
			var options []harness.DaemonOption
			if handler != "" {
				options = append(options, harness.WithHandler(handler, harness.Crun(t)))
			}
			d := harness.StartDaemon(t, options...)
			pod := runPodWith(t, d, handler, harness.HostNetwork)
			for _, test := range []struct {
				name, command, says string
				options             []harness.ContainerOption
			}{
				{"no program", "/v/garbage", "exec format error", nil},
				{"no program, terminal", "/v/garbage", "exec format error", []harness.ContainerOption{harness.WithTerminal}},
				{"no interpreter", "/v/script", "no such file or directory", nil},
			} {
				t.Run(test.name, func(t *testing.T) {
					c := pod.Create(t, append(test.options, volume, harness.Command(test.command))...)
					err := d.Cri.StartContainer(t.Context(), c.Id)
					harness.WantCode(t, err, codes.InvalidArgument, test.command)
					if err != nil && !strings.Contains(strings.ToLower(err.Error()), test.says) {
						t.Errorf("the error does not contain %q: %v", test.says, err)
					}
					status := c.Status(t)
					harness.Equal(t, "reason", status.Reason, "StartError")
					harness.Equal(t, "exit code", status.ExitCode, 128)
				})
			}
			harness.Equal(t, "the next container", pod.Sh(t, "echo works"), "works\n")
		})
	}
}
