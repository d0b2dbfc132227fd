package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// mapped gives a pod a user namespace, whose root is a user of the node, as hostUsers: false does.
func mapped(host uint32) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		ids := []*runtimeapi.IDMapping{{HostId: host, Length: 1 << 16}}
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: ids, Gids: ids}
	}
}

// podUser is the node's user that is root in the pods of these tests.
const podUser = 10 << 16

// inPod gives a container the user namespace of its pod.
func inPod(pod *harness.Pod) harness.ContainerOption {
	return harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.NamespaceOptions.UsernsOptions = pod.Config.Linux.SecurityContext.NamespaceOptions.UsernsOptions
	})
}

// userNamespace returns the user namespace of a process.
func userNamespace(t *testing.T, pid string) string {
	t.Helper()
	return harness.Get(os.Readlink("/proc/" + pid + "/ns/user"))(t)
}

// descriptors returns the open files of a process with their kinds.
func descriptors(t *testing.T, pid int) string {
	t.Helper()
	var files []string
	for _, path := range harness.Get(filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid)))(t) {
		kind, _, _ := strings.Cut(harness.Get(os.Readlink(path))(t), ":")
		files = append(files, filepath.Base(path)+" "+kind)
	}
	return strings.Join(files, "\n")
}

// Containers of pods with a user namespace are restored inside of it. They have the rights and
// mounts that they had, in the new pod's user namespace, and can be saved again.
func TestRestoreInUserNamespace(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithUsernsCRIU(t))
	for name, option := range map[string]harness.ContainerOption{
		"root":            func(*runtimeapi.ContainerConfig) {},
		"default profile": confinedConfig,
		"no capabilities": harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
			s.NoNewPrivs = true
		}),
		"user": harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.RunAsUser, s.SupplementalGroups = &runtimeapi.Int64Value{Value: 1000}, []int64{2001}
		}),
	} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t, mapped(podUser))
			c := pod.Run(t, harness.Script("(while sleep 0.02; do :; done) & "+counting), option, inPod(pod))
			waitCounted(t, c, 1)
			before, mounts, files := rights(t, c.Pid(t)), mountOptions(t, c), descriptors(t, c.Pid(t))
			for range 2 {
				restored, list := revive(t, pod, c)
				waitCounted(t, list[0], 1)
				harness.Equal(t, "rights", rights(t, list[0].Pid(t)), before)
				harness.Equal(t, "mounts", mountOptions(t, list[0]), mounts)
				harness.Equal(t, "descriptors", descriptors(t, list[0].Pid(t)), files)
				harness.Equal(t, "first process in its own /proc", list[0].Exec(t, "cat", "/proc/1/comm"), "sh")
				if userNamespace(t, strconv.Itoa(list[0].Pid(t))) == userNamespace(t, "self") {
					t.Error("the restored process is in the node's user namespace")
				}
				pod, c = restored, list[0]
			}
			c.Stop(t, 0)
			pod.Remove(t)
		})
	}
}

// With "userns" only pods with a user namespace are restored, and only with the same user IDs.
func TestRestoreInUserNamespaceRefuses(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithUsernsCRIU(t))
	for name, test := range map[string]struct {
		pod    harness.PodOption
		script string
		option harness.ContainerOption
		change func(*runtimeapi.RestorePodRequest)
		want   string
	}{
		"no user namespace": {func(*runtimeapi.PodSandboxConfig) {}, counting, nil, nil, "the pod has no user namespace"},
		"other users": {mapped(podUser), counting, nil, func(r *runtimeapi.RestorePodRequest) {
			mapped(podUser + 1<<16)(r.Config)
			r.ContainerConfigs[0].Linux.SecurityContext.NamespaceOptions.UsernsOptions = r.Config.Linux.SecurityContext.NamespaceOptions.UsernsOptions
		}, "user namespace: the checkpoint has"},
		"deleted file":         {mapped(podUser), "exec 7<>/f; rm /f; " + counting, nil, nil, "a deleted file is open"},
		"shared PID namespace": {func(c *runtimeapi.PodSandboxConfig) { mapped(podUser)(c); harness.SharedPID(c) }, counting, nil, nil, "does not support a shared PID namespace"},
		"terminal":             {mapped(podUser), counting, func(c *runtimeapi.ContainerConfig) { c.Tty = true }, nil, "does not support a terminal"},
	} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t, test.pod)
			options := []harness.ContainerOption{harness.Script(test.script), inPod(pod)}
			if test.option != nil {
				options = append(options, test.option)
			}
			c := pod.Run(t, options...)
			waitCounted(t, c, 1)
			s := save(t, pod, c)
			pod.Remove(t)
			if test.change != nil {
				test.change(s.request)
			}
			s.startRefused(t, test.want)
		})
	}
}

// A CRIU that was taken over has the rights of root in the pod's user namespace, and none outside.
func TestHostileCRIU(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithUsernsCRIU(t))
	pod := d.RunPod(t, mapped(podUser))
	c := pod.Run(t, harness.Script(counting), inPod(pod))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	d.Stop(t)
	use := func(program string) string { return fmt.Sprintf("checkpoint.criu = %q", program) }
	d.SetConfig(t, use(os.Getenv("BERTH_TEST_CRIU")), use(program(t, "hostile")))
	d.Start(t)
	_, list := restorePod(t, d, s.identity(t))
	err := d.Cri.StartContainer(t.Context(), list[0].Id)
	harness.WantCode(t, err, codes.FailedPrecondition, "hostile:")
	report := err.Error()
	if strings.Contains(report, "DONE") || !strings.Contains(report, "enter the node's mounts=") {
		t.Errorf("the attempts of a hostile CRIU: %s", report)
	}
	if want := fmt.Sprintf(" 0 %d 65536;", podUser); !strings.Contains(strings.Join(strings.Fields(report), " "), want) {
		t.Errorf("it has not the users %q: %s", want, report)
	}
}

// takenOver saves a container, and starts it with a program in place of CRIU, which
// seems to restore it (testdata/taken.c). name is that of the program.
func takenOver(t *testing.T, name string) (*harness.Container, error) {
	t.Helper()
	d := harness.StartDaemon(t, harness.WithUsernsCRIU(t))
	pod := d.RunPod(t, mapped(podUser))
	c := pod.Run(t, harness.Script(counting), inPod(pod))
	waitCounted(t, c, 1)
	s := save(t, pod, c)
	pod.Remove(t)
	d.Stop(t)
	place := filepath.Join(t.TempDir(), name)
	harness.Must(t, os.WriteFile(place, harness.Get(os.ReadFile(program(t, "taken")))(t), 0o755))
	link := filepath.Join(t.TempDir(), "criu") // as /etc/alternatives, it is not in CRIU's mount namespace
	harness.Must(t, os.Symlink(place, link))
	use := func(program string) string { return fmt.Sprintf("checkpoint.criu = %q", program) }
	d.SetConfig(t, use(os.Getenv("BERTH_TEST_CRIU")), use(link))
	d.Start(t)
	_, list := restorePod(t, d, s.identity(t))
	return list[0], d.Cri.StartContainer(t.Context(), list[0].Id)
}

// processesNamed returns how many processes of the machine have a name.
func processesNamed(t *testing.T, name string) (n int) {
	t.Helper()
	for _, file := range harness.Get(filepath.Glob("/proc/[0-9]*/comm"))(t) {
		if comm, err := os.ReadFile(file); err == nil && string(comm) == name+"\n" { // otherwise it has ended
			n++
		}
	}
	return n
}

// A CRIU that was taken over can leave a process in the node's PID namespace. It ends with the
// container's init.
func TestHostileCRIULeavesNothing(t *testing.T) {
	c, err := takenOver(t, "leaves")
	harness.Must(t, err)
	d := c.Pod.D
	harness.Equal(t, "first processes", processesNamed(t, "taken-init"), 1)
	harness.Equal(t, "processes beside them", processesNamed(t, "left-by-criu"), 1)
	init := c.Pid(t)
	d.Stop(t) // it would kill the process after it has noticed the exit
	harness.Must(t, syscall.Kill(init, syscall.SIGKILL))
	harness.EventuallyTrue(t, "the first process has ended", func() bool { return processesNamed(t, "taken-init") == 0 })
	harness.EventuallyTrue(t, "the process beside it has ended", func() bool { return processesNamed(t, "left-by-criu") == 0 })
	d.Start(t)
	c.WaitExited(t)
}

// Steps of CRIU are due once. One that comes again, when libcontainer's init has ended, would be
// done for a process that has got its PID.
func TestHostileCRIURepeatsAStep(t *testing.T) {
	_, err := takenOver(t, "repeats")
	harness.WantCode(t, err, codes.Internal, `CRIU reports the step "post-setup-namespaces" again`)
	harness.Equal(t, "processes left", processesNamed(t, "taken-init")+processesNamed(t, "left-by-criu"), 0)
}
