package oci

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	_ "github.com/opencontainers/cgroups/devices"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/configs/validate"
	_ "github.com/opencontainers/runc/libcontainer/nsenter"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/testutil"
	"berth/oci/users"
)

// TestMain is also the init of TestRun's containers: libcontainer executes this binary with "init".
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "init" {
		libcontainer.Init()
		return
	}
	os.Exit(m.Run())
}

// newNetNS returns the path of a new network namespace that lives as long as the test.
func newNetNS(t *testing.T) string {
	t.Helper()
	testutil.NeedRoot(t)
	holder := exec.Command("cat") // runs until its input ends, at the latest with this process
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	hold, err := holder.StdinPipe()
	testutil.Must(t, err)
	testutil.Must(t, holder.Start())
	t.Cleanup(func() {
		hold.Close() // a pipe
		if err := holder.Wait(); err != nil {
			t.Errorf("holder of the network namespace: %v", err)
		}
	})
	return fmt.Sprintf("/proc/%d/ns/net", holder.Process.Pid)
}

// convert passes a spec to libcontainer as the launcher does.
func convert(spec *specs.Spec, root, id string, systemd bool) (*configs.Config, error) {
	spec.Root.Path = root
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{CgroupName: id, UseSystemdCgroup: systemd, Spec: spec})
	if err != nil {
		return nil, err
	}
	return config, validate.Validate(config)
}

// detect returns the facts of the test's machine, which libcontainer uses too.
func detect(t *testing.T) Host {
	t.Helper()
	facts, err := host.Detect("/")
	testutil.Must(t, err)
	return facts
}

// libcontainer accepts the specs of typical requests.
func TestLibcontainerAccepts(t *testing.T) {
	testutil.NeedRoot(t)
	facts, netns, root := detect(t), newNetNS(t), t.TempDir()
	for name, change := range map[string]func(*ContainerInput){
		"plain":      func(*ContainerInput) {},
		"kubelet":    func(in *ContainerInput) { pod := in.Pod; *in = kubeletInput(); in.Pod = pod; in.Host = facts },
		"privileged": func(in *ContainerInput) { in.privilege() },
		"seccomp":    func(in *ContainerInput) { in.sc().Seccomp = profile(runtimeDefault, "") },
		"localhost":  func(in *ContainerInput) { in.sc().Seccomp = profile(localhost, "/profiles/allow.json") },
		"devices":    func(in *ContainerInput) { in.Config.Devices = []*runtimeapi.Device{{HostPath: "/dev/snd"}} },
		"host namespaces": func(in *ContainerInput) {
			o := &runtimeapi.NamespaceOption{Network: nsNode, Ipc: nsNode, Pid: nsNode}
			in.sc().NamespaceOptions, in.Pod.Config.Linux.SecurityContext.NamespaceOptions = o, o
		},
		"mounts": func(in *ContainerInput) {
			in.Config.Mounts = []*runtimeapi.Mount{
				{ContainerPath: "/a", HostPath: "/srv/data", Readonly: true, RecursiveReadOnly: true},
				{ContainerPath: "/b", HostPath: "/srv/shared/vol", Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL},
				{ContainerPath: "/c", HostPath: "/srv/data", MountOptions: slices.Sorted(maps.Keys(mountOptions))},
			}
		},
		"systemd": func(in *ContainerInput) { in.SystemdCgroup, in.Pod.CgroupParent = true, "kubepods-pod1.slice" },
	} {
		t.Run(name, func(t *testing.T) {
			in := testInput()
			in.Host = facts
			in.Pod.NetNS, in.Pod.PausePID = netns, os.Getpid()
			change(&in)
			config, err := convert(mustSpec(t, in), root, in.ID, in.SystemdCgroup)
			testutil.Must(t, err)
			for _, m := range config.Mounts {
				if m.IsBind() && m.Data != "" {
					t.Errorf("mount option of %s not understood: %s", m.Destination, m.Data)
				}
			}
		})
	}
}

func TestLibcontainerAcceptsSandbox(t *testing.T) {
	testutil.NeedRoot(t)
	in := testSandbox()
	in.Host, in.Pod.NetNS = detect(t), newNetNS(t)
	in.sc().Seccomp = profile(runtimeDefault, "")
	in.Pod.Config.Linux.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1", "net/core/somaxconn": "100", "fs.mqueue.msg_max": "20",
		"kernel.domainname": "example.org"}
	spec, err := SandboxSpec(in)
	testutil.Must(t, err)
	if _, err := convert(spec, t.TempDir(), in.Pod.ID, false); err != nil {
		t.Error(err)
	}
}

// TestRun starts a pause and a container in its namespaces through libcontainer. The container
// reports its environment.
func TestRun(t *testing.T) {
	facts := detect(t)
	id := fmt.Sprintf("berth-oci-test-%d", os.Getpid())
	state := t.TempDir()
	rootfs := busyboxRoot(t)

	sandbox := testSandbox()
	sandbox.Host, sandbox.Files = facts, host.Files{}
	sandbox.Pod.ID, sandbox.Pod.CgroupParent, sandbox.Pod.NetNS = id, "/", newNetNS(t)
	sandbox.Pod.Config.Linux.Sysctls = map[string]string{"net.core.somaxconn": "123", "kernel.shm_rmid_forced": "1"}
	sandbox.Image = &ocispec.ImageConfig{Entrypoint: []string{"/bin/sleep", "1000"}}
	spec, err := SandboxSpec(sandbox)
	testutil.Must(t, err)
	*spec.Process.OOMScoreAdj = max(*spec.Process.OOMScoreAdj, facts.OOMScoreAdjMin) // as the caller does
	pause, _ := start(t, state, id, rootfs, spec, &bytes.Buffer{})

	sandbox.Pod.PausePID = pause
	in := probeInput(t, facts, id+"-c", sandbox.Pod)
	out := &bytes.Buffer{}
	_, wait := start(t, state, in.ID, rootfs, mustSpec(t, in), out)
	if err := wait(); err != nil {
		t.Errorf("container: %v", err)
	}
	pidns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pause))
	testutil.Must(t, err)
	want := `1000
100
groups 100 29 50 4000
/tmp
/home/app
web-0
500
123
1
10.0.0.1 web-0
CapInh:	0000000000000400
CapPrm:	0000000000000400
CapEff:	0000000000000400
CapBnd:	0000000000000400
CapAmb:	0000000000000400
NoNewPrivs:	1
root is read-only
data is read-only
device is there
` + pidns + `
kcore is masked
`
	if got := out.String(); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

// probeInput returns a container with many restrictions, whose command prints their effects.
func probeInput(t *testing.T, facts Host, id string, pod Pod) ContainerInput {
	t.Helper()
	in := testInput()
	in.Host, in.Files = facts, host.Files{}
	in.ID, in.Pod = id, pod
	dir := t.TempDir()
	in.Pod.Hosts, in.Pod.Hostname, in.Pod.ResolvConf, in.Pod.Shm = filepath.Join(dir, "hosts"), "", "", dir
	testutil.Must(t, os.WriteFile(in.Pod.Hosts, []byte("10.0.0.1 web-0\n"), 0o644))
	in.sc().NamespaceOptions = nil
	in.sc().ReadonlyRootfs = true
	in.sc().NoNewPrivs = true
	in.sc().Seccomp = profile(unconfined, "")
	in.sc().MaskedPaths = []string{"/proc/kcore"}
	in.sc().Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}}
	in.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 100, OomScoreAdj: 500}
	in.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: dir, Readonly: true, RecursiveReadOnly: true}}
	in.Config.WorkingDir = "/tmp"
	in.Config.Devices = []*runtimeapi.Device{{HostPath: "/dev/zero", ContainerPath: "/dev/other", Permissions: "r"}}
	const passwd = "app:x:1000:100:App:/home/app:/bin/sh\n"
	const group = "staff:x:50:app,other\naudio:x:29:other,app\nappgroup:x:100:app\n"
	var err error
	in.User, err = users.Resolve([]byte(passwd), []byte(group), users.Request{ImageUser: "app", Groups: []int64{4000}})
	testutil.Must(t, err)
	in.Config.Command = []string{"/bin/sh", "-c", `
id -u; id -g; echo groups $(id -G); pwd; echo $HOME; hostname
cat /proc/self/oom_score_adj /proc/sys/net/core/somaxconn /proc/sys/kernel/shm_rmid_forced /etc/hosts
grep -E '^(CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs)' /proc/self/status
touch /x 2>/dev/null || echo root is read-only
touch /data/x 2>/dev/null || echo data is read-only
test -c /dev/other && echo device is there
readlink /proc/self/ns/pid
test -s /proc/kcore || echo kcore is masked
`}
	return in
}

// busyboxRoot makes a root filesystem with a shell, and the directories that mounts need.
func busyboxRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("this test needs busybox-static: ", err)
	}
	data, err := os.ReadFile(busybox)
	testutil.Must(t, err)
	for _, dir := range []string{"bin", "tmp"} {
		testutil.Must(t, os.Mkdir(filepath.Join(root, dir), 0o755))
	}
	testutil.Must(t, os.WriteFile(filepath.Join(root, "bin/busybox"), data, 0o755))
	for _, name := range strings.Fields("sh sleep id hostname cat grep touch readlink test pwd echo") {
		testutil.Must(t, os.Symlink("busybox", filepath.Join(root, "bin", name)))
	}
	return root
}

// start runs a spec and returns the PID of its init. The container ends with the test.
func start(t *testing.T, state, id, root string, spec *specs.Spec, out *bytes.Buffer) (pid int, wait func() error) {
	t.Helper()
	config, err := convert(spec, root, id, false)
	testutil.Must(t, err)
	container, err := libcontainer.Create(state, id, config)
	testutil.Must(t, err)
	p := spec.Process
	groups := make([]int, len(p.User.AdditionalGids))
	for i, g := range p.User.AdditionalGids {
		groups[i] = int(g)
	}
	process := &libcontainer.Process{Init: true, Args: p.Args, Env: p.Env, Cwd: p.Cwd, Stdout: out, Stderr: out,
		UID: int(p.User.UID), GID: int(p.User.GID), AdditionalGroups: groups}
	t.Cleanup(func() {
		process.Signal(syscall.SIGKILL) // it may have ended
		process.Wait()
		if err := container.Destroy(); err != nil {
			t.Errorf("destroy %s: %v", id, err)
		}
	})
	if err := container.Run(process); err != nil {
		t.Fatalf("run %s: %v (output: %s)", id, err, out)
	}
	pid, err = process.Pid()
	testutil.Must(t, err)
	return pid, func() error {
		_, err := process.Wait()
		return err
	}
}
