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
)

// Bad requests for images are in TestPullUnknown and TestPullBadLayers, those for
// the network in TestNetworkConfigHotPlug and TestPluginFailure.

func TestBadPods(t *testing.T) {
	d := startDaemon(t)
	for _, c := range []struct {
		name   string
		change podOption
		code   codes.Code
		says   string
	}{
		{"unknown sysctl", sysctl("kernel.no_such_thing", "1"), codes.InvalidArgument, "kernel.no_such_thing"},
		{"sysctl of the node", sysctl("kernel.panic", "1"), codes.InvalidArgument, "kernel.panic"},
		{"sysctl that escapes", sysctl("net/../kernel/panic", "1"), codes.InvalidArgument, "net/../kernel/panic"},
		{"sysctl value with a newline", sysctl("net.ipv4.ip_forward", "1\nkernel.panic=1"), codes.InvalidArgument, "net.ipv4.ip_forward"},
		{"sysctl value with a plus", sysctl("kernel.shm_rmid_forced", "1+kernel.core_pattern=|/x"), codes.InvalidArgument, "kernel.shm_rmid_forced"},
		{"network sysctl with host network", func(c *runtimeapi.PodSandboxConfig) { hostNetwork(c); sysctl("net.ipv4.ip_forward", "0")(c) }, codes.InvalidArgument, "net.ipv4.ip_forward"},
		{"IPC sysctl with host IPC", func(c *runtimeapi.PodSandboxConfig) { hostIPC(c); sysctl("kernel.msgmax", "8192")(c) }, codes.InvalidArgument, "kernel.msgmax"},
		{"no metadata", func(c *runtimeapi.PodSandboxConfig) { c.Metadata = nil }, codes.InvalidArgument, "metadata"},
		{"name with ../", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = "../../escape" }, codes.InvalidArgument, "escape"},
		{"uid with ../", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Uid = "../../escape" }, codes.InvalidArgument, "escape"},
		{"namespace with ../", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "../../escape" }, codes.InvalidArgument, "escape"},
		{"cgroup parent with ..", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = "/" + machine + "/../../escape" }, codes.InvalidArgument, ".."},
		{"cgroup parent of the other driver", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = foreignParent() }, codes.InvalidArgument, foreignParent()},
		{"hostname with a slash", func(c *runtimeapi.PodSandboxConfig) { c.Hostname = "a/b" }, codes.InvalidArgument, "a/b"},
		{"relative log directory", func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = "logs/here" }, codes.InvalidArgument, "logs/here"},
		{"target namespace for a pod", podSecurity(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET
		}), codes.InvalidArgument, "TARGET"},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := d.podConfig(t)
			c.change(config)
			id, err := d.cri.RunPodSandbox(t.Context(), config, "")
			if err == nil {
				d.objects = append(d.objects, id)
				t.Cleanup(func() { (&pod{d: d, id: id, config: config}).remove(t) })
			}
			wantCode(t, err, c.code, c.says)
			equal(t, "number of pods", len(get(d.cri.ListPodSandbox(t.Context(), nil))(t)), 0)
			d.noLeaks(t)
		})
	}
}

// foreignParent is a cgroup parent as kubelet writes it for the other driver.
func foreignParent() string {
	if systemdDriver() {
		return "/kubepods/besteffort"
	}
	return "kubepods-besteffort.slice"
}

func TestBadContainers(t *testing.T) {
	d := startDaemon(t)
	d.pull(t, baseImage)
	pod := d.runPod(t)
	pod.pausePID(t)
	d.waitIdle(t)
	empty := d.empty
	d.empty = d.snapshot(t) // each case must leave what there was: the pod
	t.Cleanup(func() { d.empty = empty })
	loop := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink("loop", loop); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change containerOption
		code   codes.Code
		says   string
	}{
		{"unknown image", image(registry.Host + "/no/such:image"), codes.NotFound, "no/such:image"},
		{"no image", func(c *runtimeapi.ContainerConfig) { c.Image = nil }, codes.InvalidArgument, "image"},
		{"no metadata", func(c *runtimeapi.ContainerConfig) { c.Metadata = nil }, codes.InvalidArgument, "metadata"},
		{"name with ../", containerNamed("../../escape"), codes.InvalidArgument, "escape"},
		{"log path outside", func(c *runtimeapi.ContainerConfig) { c.LogPath = "../../../escape.log" }, codes.InvalidArgument, "escape.log"},
		{"absolute log path", func(c *runtimeapi.ContainerConfig) { c.LogPath = "/run/escape.log" }, codes.InvalidArgument, "escape.log"},
		{"unknown user", security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUsername = "nobody-knows" }), codes.InvalidArgument, "nobody-knows"},
		{"group without user", security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsGroup = &runtimeapi.Int64Value{Value: 5} }), codes.InvalidArgument, "run_as_group"},
		{"missing mount source", mount(&runtimeapi.Mount{ContainerPath: "/m", HostPath: "/no/such/source"}), codes.InvalidArgument, "/no/such/source"},
		{"mount source below a file", mount(&runtimeapi.Mount{ContainerPath: "/m", HostPath: "/etc/passwd/x"}), codes.InvalidArgument, "/etc/passwd/x"},
		{"mount source of links round and round", mount(&runtimeapi.Mount{ContainerPath: "/m", HostPath: loop}), codes.InvalidArgument, loop},
		{"mount source with a long name", mount(&runtimeapi.Mount{ContainerPath: "/m", HostPath: "/" + strings.Repeat("x", 256)}), codes.InvalidArgument, "xxx"},
		{"device below a file", device(&runtimeapi.Device{HostPath: "/etc/passwd/x"}), codes.InvalidArgument, "/etc/passwd/x"},
		{"device of links round and round", device(&runtimeapi.Device{HostPath: loop}), codes.InvalidArgument, loop},
		{"relative mount target", mount(&runtimeapi.Mount{ContainerPath: "m", HostPath: "/tmp"}), codes.InvalidArgument, "\"m\""},
		{"missing device", func(c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/no-such", ContainerPath: "/dev/x", Permissions: "rwm"}}
		}, codes.InvalidArgument, "/dev/no-such"},
		{"unknown capability", security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Capabilities.AddCapabilities = []string{"FLY"} }), codes.InvalidArgument, "FLY"},
		{"privileged in a pod that is not", security(privileged), codes.InvalidArgument, "privileged"},
		{"unknown namespace target", security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET
			s.NamespaceOptions.TargetId = "feedfacefeed"
		}), codes.NotFound, "feedfacefeed"},
		{"missing seccomp profile", security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "/no/such/profile.json"}
		}), codes.InvalidArgument, "/no/such/profile.json"},
		{"working directory in /proc/self/fd", func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/proc/self/fd/7" }, codes.InvalidArgument, "/proc/self/fd/7"},
		{"negative memory limit", resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = -5 }), codes.InvalidArgument, "memory_limit_in_bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := d.cri.CreateContainer(t.Context(), pod.id, pod.containerConfig(c.change), pod.config)
			wantCode(t, err, c.code, c.says)
			equal(t, "number of containers", len(get(d.cri.ListContainers(t.Context(), nil))(t)), 0)
			if _, err := os.Stat("/run/escape.log"); err == nil {
				t.Error("a log was made outside the pod's directory")
			}
			d.noLeaks(t)
		})
	}
}

// What only shows when the process is started: the error names the cause, and the
// container has exited with the code other runtimes use for it, too.
func TestBadCommands(t *testing.T) {
	plain, _ := push(t, registry, "plain:latest", buildImage(t, v1.Config{}, fixture.Tree{fixture.File("plain", 0o644, "no program")}))
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	for _, c := range []struct {
		name string
		opts []containerOption
		says string
	}{
		{"command not found", []containerOption{command("no-such-command")}, "no-such-command"},
		{"path not found", []containerOption{command("/no/such/path")}, "/no/such/path"},
		{"not executable", []containerOption{image(plain), command("/plain")}, "/plain"},
		{"a directory", []containerOption{command("/tmp")}, "/tmp"},
		{"working directory is a file", []containerOption{func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/etc/passwd" }}, "/etc/passwd"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctr := pod.create(t, c.opts...)
			err := d.cri.StartContainer(t.Context(), ctr.id)
			if err == nil {
				t.Fatalf("it started: %v", ctr.waitExited(t))
			}
			wantCode(t, err, codes.InvalidArgument, c.says)
			status := ctr.status(t)
			equal(t, "state", status.State, runtimeapi.ContainerState_CONTAINER_EXITED)
			equal(t, "exit code", status.ExitCode, 128)
			if !strings.Contains(status.Message, c.says) {
				t.Errorf("the status message does not name %s: %q", c.says, status.Message)
			}
			must(t, d.cri.RemoveContainer(t.Context(), ctr.id))
		})
	}
}

func TestUnknownIDs(t *testing.T) {
	d := startDaemon(t)
	ctx := t.Context()
	pod := d.runPod(t, hostNetwork)
	d.pull(t, baseImage)
	for _, id := range []string{"feedfacefeed", strings.Repeat("ab", 32), "../../../etc", "name with blanks"} {
		for name, call := range map[string]func() error{
			"PodSandboxStatus": func() error { _, err := d.cri.PodSandboxStatus(ctx, id, false); return err },
			"ContainerStatus":  func() error { _, err := d.cri.ContainerStatus(ctx, id, false); return err },
			"StartContainer":   func() error { return d.cri.StartContainer(ctx, id) },
			"ReopenLog":        func() error { return d.cri.ReopenContainerLog(ctx, id) },
			"CreateContainer":  func() error { _, err := d.cri.CreateContainer(ctx, id, pod.containerConfig(), pod.config); return err },
		} {
			if code := codeOf(call()); code != codes.NotFound {
				t.Errorf("%s of %q answers %s, want NotFound", name, id, code)
			}
		}
		// These are idempotent: what does not exist is stopped and removed already.
		for name, call := range map[string]func() error{
			"StopPodSandbox":   func() error { return d.cri.StopPodSandbox(ctx, id) },
			"RemovePodSandbox": func() error { return d.cri.RemovePodSandbox(ctx, id) },
			"StopContainer":    func() error { return d.cri.StopContainer(ctx, id, 0) },
			"RemoveContainer":  func() error { return d.cri.RemoveContainer(ctx, id) },
			"RemoveImage": func() error {
				return d.images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: registry.Host + "/no/such:image"})
			},
		} {
			if err := call(); err != nil {
				t.Errorf("%s of %q: %v", name, id, err)
			}
		}
	}
	_, err := d.cri.PodSandboxStatus(ctx, "", false)
	wantCode(t, err, codes.InvalidArgument, "pod_sandbox_id")
	wantCode(t, d.cri.StopPodSandbox(ctx, ""), codes.InvalidArgument, "pod_sandbox_id")
}

// A log path that leads out of the pod's directory through a link is refused.
func TestLogPathThroughSymlink(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	outside := t.TempDir()
	must(t, os.Symlink(outside, filepath.Join(pod.config.LogDirectory, "link")))
	d.pull(t, baseImage)
	id, err := d.cri.CreateContainer(t.Context(), pod.id, pod.containerConfig(func(c *runtimeapi.ContainerConfig) { c.LogPath = "link/0.log" }), pod.config)
	if err == nil {
		d.objects = append(d.objects, id)
		err = d.cri.StartContainer(t.Context(), id)
	}
	if err == nil {
		t.Error("the container started")
	}
	if files := readDir(outside); len(files) > 0 {
		t.Errorf("files were made outside: %v", files)
	}
}
