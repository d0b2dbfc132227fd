package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// TestPullUnknown and TestPullBadLayers contain the bad requests for images,
// TestNetworkConfigHotPlug and TestPluginFailure those for the network.

func TestBadPods(t *testing.T) {
	d := harness.StartDaemon(t)
	for _, c := range []struct {
		name   string
		change harness.PodOption
		code   codes.Code
		says   string
	}{
		{"unknown sysctl", harness.Sysctl("kernel.no_such_thing", "1"), codes.InvalidArgument, "kernel.no_such_thing"},
		{"sysctl of the node", harness.Sysctl("kernel.panic", "1"), codes.InvalidArgument, "kernel.panic"},
		{"sysctl with ../", harness.Sysctl("net/../kernel/panic", "1"), codes.InvalidArgument, "net/../kernel/panic"},
		{"sysctl value with a newline", harness.Sysctl("net.ipv4.ip_forward", "1\nkernel.panic=1"), codes.InvalidArgument, "net.ipv4.ip_forward"},
		{"sysctl value with a plus", harness.Sysctl("kernel.shm_rmid_forced", "1+kernel.core_pattern=|/x"), codes.InvalidArgument, "kernel.shm_rmid_forced"},
		{"network sysctl with host network", func(c *runtimeapi.PodSandboxConfig) {
			harness.HostNetwork(c)
			harness.Sysctl("net.ipv4.ip_forward", "0")(c)
		}, codes.InvalidArgument, "net.ipv4.ip_forward"},
		{"IPC sysctl with host IPC", func(c *runtimeapi.PodSandboxConfig) { harness.HostIPC(c); harness.Sysctl("kernel.msgmax", "8192")(c) }, codes.InvalidArgument, "kernel.msgmax"},
		{"no metadata", func(c *runtimeapi.PodSandboxConfig) { c.Metadata = nil }, codes.InvalidArgument, "metadata"},
		{"name with ../", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = "../../escape" }, codes.InvalidArgument, "escape"},
		{"uid with ../", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Uid = "../../escape" }, codes.InvalidArgument, "escape"},
		{"namespace with ../", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "../../escape" }, codes.InvalidArgument, "escape"},
		{"cgroup parent with ..", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = "/" + harness.Machine + "/../../escape" }, codes.InvalidArgument, ".."},
		{"cgroup parent of the other driver", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = foreignParent() }, codes.InvalidArgument, foreignParent()},
		{"hostname with a slash", func(c *runtimeapi.PodSandboxConfig) { c.Hostname = "a/b" }, codes.InvalidArgument, "a/b"},
		{"host port without container port", harness.HostPort(2, 0, runtimeapi.Protocol_TCP), codes.InvalidArgument, "2:0"},
		{"unknown protocol", harness.HostPort(2, 3, 99), codes.InvalidArgument, "99"},
		{"invalid bandwidth", func(c *runtimeapi.PodSandboxConfig) { c.Annotations["kubernetes.io/ingress-bandwidth"] = "much" }, codes.InvalidArgument, "much"},
		{"name with a semicolon", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = "a;K8S_POD_UID=b" }, codes.InvalidArgument, "a;K8S_POD_UID=b"},
		{"relative log directory", func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = "logs/here" }, codes.InvalidArgument, "logs/here"},
		{"target namespace for a pod", harness.PodSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET
		}), codes.InvalidArgument, "TARGET"},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := d.PodConfig(t)
			c.change(config)
			id, err := d.Cri.RunPodSandbox(t.Context(), config, "")
			if err == nil {
				d.Objects = append(d.Objects, id)
				t.Cleanup(func() { (&harness.Pod{D: d, Id: id, Config: config}).Remove(t) })
			}
			harness.WantCode(t, err, c.code, c.says)
			harness.Equal(t, "number of pods", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 0)
			d.NoLeaks(t)
		})
	}
}

// foreignParent returns a cgroup parent as kubelet writes it for the other cgroup driver.
func foreignParent() string {
	if harness.SystemdDriver() {
		return "/kubepods/besteffort"
	}
	return "kubepods-besteffort.slice"
}

func TestBadContainers(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	pod := d.RunPod(t)
	pod.PausePID(t)
	d.WaitWatched(t)
	empty := d.Empty
	d.Empty = d.Snapshot(t) // each case must leave only the pod
	t.Cleanup(func() { d.Empty = empty })
	loop := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink("loop", loop); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change harness.ContainerOption
		code   codes.Code
		says   string
	}{
		{"unknown image", harness.Image(harness.Registry.Host + "/no/such:image"), codes.NotFound, "no/such:image"},
		{"no image", func(c *runtimeapi.ContainerConfig) { c.Image = nil }, codes.InvalidArgument, "image"},
		{"no metadata", func(c *runtimeapi.ContainerConfig) { c.Metadata = nil }, codes.InvalidArgument, "metadata"},
		{"name with ../", harness.ContainerNamed("../../escape"), codes.InvalidArgument, "escape"},
		{"log path outside", func(c *runtimeapi.ContainerConfig) { c.LogPath = "../../../escape.log" }, codes.InvalidArgument, "escape.log"},
		{"absolute log path", func(c *runtimeapi.ContainerConfig) { c.LogPath = "/run/escape.log" }, codes.InvalidArgument, "escape.log"},
		{"unknown user", harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUsername = "nobody-knows" }), codes.InvalidArgument, "nobody-knows"},
		{"group without user", harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsGroup = &runtimeapi.Int64Value{Value: 5} }), codes.InvalidArgument, "run_as_group"},
		{"mount source below a file", harness.Mount(&runtimeapi.Mount{ContainerPath: "/m", HostPath: "/etc/passwd/x"}), codes.InvalidArgument, "/etc/passwd/x"},
		{"mount source in a link loop", harness.Mount(&runtimeapi.Mount{ContainerPath: "/m", HostPath: loop}), codes.InvalidArgument, loop},
		{"mount source with a long name", harness.Mount(&runtimeapi.Mount{ContainerPath: "/m", HostPath: "/" + strings.Repeat("x", 256)}), codes.InvalidArgument, "xxx"},
		{"device below a file", device(&runtimeapi.Device{HostPath: "/etc/passwd/x"}), codes.InvalidArgument, "/etc/passwd/x"},
		{"device in a link loop", device(&runtimeapi.Device{HostPath: loop}), codes.InvalidArgument, loop},
		{"relative mount target", harness.Mount(&runtimeapi.Mount{ContainerPath: "m", HostPath: "/tmp"}), codes.InvalidArgument, "\"m\""},
		{"missing device", func(c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/no-such", ContainerPath: "/dev/x", Permissions: "rwm"}}
		}, codes.InvalidArgument, "/dev/no-such"},
		{"unknown capability", harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Capabilities.AddCapabilities = []string{"FLY"} }), codes.InvalidArgument, "FLY"},
		{"privileged in an unprivileged pod", harness.Security(harness.Privileged), codes.InvalidArgument, "privileged"},
		{"unknown namespace target", harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET
			s.NamespaceOptions.TargetId = "feedfacefeed"
		}), codes.NotFound, "feedfacefeed"},
		{"missing seccomp profile", harness.Security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "/no/such/profile.json"}
		}), codes.InvalidArgument, "/no/such/profile.json"},
		{"working directory in /proc/self/fd", func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/proc/self/fd/7" }, codes.InvalidArgument, "/proc/self/fd/7"},
		{"negative memory limit", harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = -5 }), codes.InvalidArgument, "memory_limit_in_bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := d.Cri.CreateContainer(t.Context(), pod.Id, pod.ContainerConfig(c.change), pod.Config)
			harness.WantCode(t, err, c.code, c.says)
			harness.Equal(t, "number of containers", len(harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)), 0)
			if _, err := os.Stat("/run/escape.log"); err == nil {
				t.Error("a log was created outside the pod's directory")
			}
			d.NoLeaks(t)
		})
	}
}

// These errors appear only when the process starts. The error names the cause, and the container
// exits with the code that other runtimes use.
func TestBadCommands(t *testing.T) {
	plain, _ := harness.Push(t, harness.Registry, "plain:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("plain", 0o644, "no program")}))
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	for _, c := range []struct {
		name string
		opts []harness.ContainerOption
		says string
	}{
		{"command not found", []harness.ContainerOption{harness.Command("no-such-command")}, "no-such-command"},
		{"path not found", []harness.ContainerOption{harness.Command("/no/such/path")}, "/no/such/path"},
		{"not executable", []harness.ContainerOption{harness.Image(plain), harness.Command("/plain")}, "/plain"},
		{"a directory", []harness.ContainerOption{harness.Command("/tmp")}, "/tmp"},
		{"working directory is a file", []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/etc/passwd" }}, "/etc/passwd"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctr := pod.Create(t, c.opts...)
			err := d.Cri.StartContainer(t.Context(), ctr.Id)
			if err == nil {
				t.Fatalf("it started: %v", ctr.WaitExited(t))
			}
			harness.WantCode(t, err, codes.InvalidArgument, c.says)
			status := ctr.Status(t)
			harness.Equal(t, "state", status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
			harness.Equal(t, "exit code", status.ExitCode, 128)
			harness.WantText(t, "status message", status.Message, c.says)
			harness.Must(t, d.Cri.RemoveContainer(t.Context(), ctr.Id))
		})
	}
}

func TestUnknownIDs(t *testing.T) {
	d := harness.StartDaemon(t)
	ctx := t.Context()
	pod := d.RunPod(t, harness.HostNetwork)
	d.Pull(t, harness.BaseImage)
	for _, id := range []string{"feedfacefeed", strings.Repeat("ab", 32), "../../../etc", "name with blanks"} {
		for name, call := range map[string]func() error{
			"PodSandboxStatus": func() error { _, err := d.Cri.PodSandboxStatus(ctx, id, false); return err },
			"ContainerStatus":  func() error { _, err := d.Cri.ContainerStatus(ctx, id, false); return err },
			"StartContainer":   func() error { return d.Cri.StartContainer(ctx, id) },
			"ReopenLog":        func() error { return d.Cri.ReopenContainerLog(ctx, id) },
			"CreateContainer":  func() error { _, err := d.Cri.CreateContainer(ctx, id, pod.ContainerConfig(), pod.Config); return err },
		} {
			if code := harness.CodeOf(call()); code != codes.NotFound {
				t.Errorf("%s of %q answers %s, want NotFound", name, id, code)
			}
		}
		// Stop and remove calls are idempotent. They succeed for objects that do not exist.
		for name, call := range map[string]func() error{
			"StopPodSandbox":   func() error { return d.Cri.StopPodSandbox(ctx, id) },
			"RemovePodSandbox": func() error { return d.Cri.RemovePodSandbox(ctx, id) },
			"StopContainer":    func() error { return d.Cri.StopContainer(ctx, id, 0) },
			"RemoveContainer":  func() error { return d.Cri.RemoveContainer(ctx, id) },
			"RemoveImage": func() error {
				return d.Images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: harness.Registry.Host + "/no/such:image"})
			},
		} {
			if err := call(); err != nil {
				t.Errorf("%s of %q: %v", name, id, err)
			}
		}
	}
	_, err := d.Cri.PodSandboxStatus(ctx, "", false)
	harness.WantCode(t, err, codes.InvalidArgument, "pod_sandbox_id")
	harness.WantCode(t, d.Cri.StopPodSandbox(ctx, ""), codes.InvalidArgument, "pod_sandbox_id")
}

// A log path that leads out of the pod's directory through a link is refused.
func TestLogPathThroughSymlink(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	outside := t.TempDir()
	harness.Must(t, os.Symlink(outside, filepath.Join(pod.Config.LogDirectory, "link")))
	d.Pull(t, harness.BaseImage)
	id, err := d.Cri.CreateContainer(t.Context(), pod.Id, pod.ContainerConfig(func(c *runtimeapi.ContainerConfig) { c.LogPath = "link/0.log" }), pod.Config)
	if err == nil {
		d.Objects = append(d.Objects, id)
		err = d.Cri.StartContainer(t.Context(), id)
	}
	if err == nil {
		t.Error("the container started")
	}
	if files := machine.ReadDir(outside); len(files) > 0 {
		t.Errorf("files were created outside the pod's directory: %v", files)
	}
}
