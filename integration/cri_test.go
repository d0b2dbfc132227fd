package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// --- pods ---------------------------------------------------------------------

// pod is a sandbox made by a test.
type pod struct {
	d      *daemon
	id     string
	config *runtimeapi.PodSandboxConfig
}

type podOption func(*runtimeapi.PodSandboxConfig)

// podConfig returns a pod's configuration as kubelet would send it.
func (d *daemon) podConfig(t *testing.T, opts ...podOption) *runtimeapi.PodSandboxConfig {
	t.Helper()
	n := d.pods.Add(1)
	uid := fmt.Sprintf("uid-%d", n)
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: fmt.Sprintf("pod-%d", n), Namespace: "default", Uid: uid},
		Hostname:     fmt.Sprintf("pod-%d", n),
		LogDirectory: filepath.Join(d.logDir, uid),
		Labels:       map[string]string{},
		Annotations:  map[string]string{},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: d.cgroupParent(uid),
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
			},
		},
	}
	for _, opt := range opts {
		opt(config)
	}
	must(t, os.MkdirAll(config.LogDirectory, 0o755))
	return config
}

// runPod runs a pod and expects success.
func (d *daemon) runPod(t *testing.T, opts ...podOption) *pod {
	t.Helper()
	return d.runPodConfig(t, d.podConfig(t, opts...))
}

func (d *daemon) runPodConfig(t *testing.T, config *runtimeapi.PodSandboxConfig) *pod {
	t.Helper()
	id, err := d.cri.RunPodSandbox(t.Context(), config, "")
	if err != nil {
		t.Fatalf("run pod %s: %v", config.Metadata.Name, err)
	}
	d.objects = append(d.objects, id)
	return &pod{d: d, id: id, config: config}
}

func (p *pod) status(t *testing.T) *runtimeapi.PodSandboxStatus {
	t.Helper()
	response, err := p.d.cri.PodSandboxStatus(t.Context(), p.id, false)
	must(t, err)
	return response.Status
}

func (p *pod) stop(t *testing.T) {
	t.Helper()
	must(t, p.d.cri.StopPodSandbox(context.WithoutCancel(t.Context()), p.id))
}

func (p *pod) remove(t *testing.T) {
	t.Helper()
	p.stop(t)
	must(t, p.d.cri.RemovePodSandbox(context.WithoutCancel(t.Context()), p.id))
}

func (p *pod) ip(t *testing.T) string { t.Helper(); return p.status(t).Network.GetIp() }

func podLabel(key, value string) podOption {
	return func(c *runtimeapi.PodSandboxConfig) { c.Labels[key] = value }
}

func podNamed(name string) podOption {
	return func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = name }
}

func podSecurity(change func(*runtimeapi.LinuxSandboxSecurityContext)) podOption {
	return func(c *runtimeapi.PodSandboxConfig) { change(c.Linux.SecurityContext) }
}

// hostNetwork puts the pod into the node's network namespace.
func hostNetwork(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
	c.Hostname = "" // kubelet sends the node's
}

func hostPID(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_NODE
}

func hostIPC(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_NODE
}

// sharedPID is a pod whose containers share one PID namespace.
func sharedPID(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
}

func sysctl(name, value string) podOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		if c.Linux.Sysctls == nil {
			c.Linux.Sysctls = map[string]string{}
		}
		c.Linux.Sysctls[name] = value
	}
}

func hostPort(port, containerPort int32, protocol runtimeapi.Protocol) podOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.PortMappings = append(c.PortMappings, &runtimeapi.PortMapping{Protocol: protocol, ContainerPort: containerPort, HostPort: port})
	}
}

// --- containers ---------------------------------------------------------------

// container is a container made by a test.
type container struct {
	pod    *pod
	id     string
	config *runtimeapi.ContainerConfig
}

type containerOption func(*runtimeapi.ContainerConfig)

// containerConfig returns the configuration of a container that sleeps.
func (p *pod) containerConfig(opts ...containerOption) *runtimeapi.ContainerConfig {
	n := p.d.pods.Add(1)
	name := fmt.Sprintf("c%d", n)
	namespaces := p.config.Linux.SecurityContext.NamespaceOptions
	config := &runtimeapi.ContainerConfig{
		Metadata:    &runtimeapi.ContainerMetadata{Name: name},
		Image:       &runtimeapi.ImageSpec{Image: baseImage, UserSpecifiedImage: baseImage},
		Command:     []string{"sleep", "100000"},
		LogPath:     name + "/0.log",
		Labels:      map[string]string{},
		Annotations: map[string]string{},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{CpuPeriod: 100000, CpuShares: 2, OomScoreAdj: 1000},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: namespaces.Network, Pid: namespaces.Pid, Ipc: namespaces.Ipc},
				Capabilities:     &runtimeapi.Capability{},
				MaskedPaths:      []string{"/proc/kcore", "/proc/keys", "/sys/firmware"},
				ReadonlyPaths:    []string{"/proc/sys", "/proc/bus"},
			},
		},
	}
	for _, opt := range opts {
		opt(config)
	}
	return config
}

// create creates a container and expects success. The image is pulled if need be.
func (p *pod) create(t *testing.T, opts ...containerOption) *container {
	t.Helper()
	c, err := p.tryCreate(t, opts...)
	if err != nil {
		t.Fatalf("create container %s: %v", c.config.Metadata.Name, err)
	}
	return c
}

func (p *pod) tryCreate(t *testing.T, opts ...containerOption) (*container, error) {
	t.Helper()
	config := p.containerConfig(opts...)
	p.d.ensureImage(t, config.Image.Image)
	if config.LogPath != "" && filepath.IsLocal(config.LogPath) {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(p.config.LogDirectory, config.LogPath)), 0o755))
	}
	id, err := p.d.cri.CreateContainer(t.Context(), p.id, config, p.config)
	if err == nil {
		p.d.objects = append(p.d.objects, id)
	}
	return &container{pod: p, id: id, config: config}, err
}

// run creates and starts a container and expects success.
func (p *pod) run(t *testing.T, opts ...containerOption) *container {
	t.Helper()
	c := p.create(t, opts...)
	c.start(t)
	return c
}

// runToEnd runs a container until it exits, and returns it and its final status.
func (p *pod) runToEnd(t *testing.T, opts ...containerOption) (*container, *runtimeapi.ContainerStatus) {
	t.Helper()
	c := p.run(t, opts...)
	return c, c.waitExited(t)
}

// sh runs a script to its end, which must be good, and returns its output.
func (p *pod) sh(t *testing.T, script string, opts ...containerOption) string {
	t.Helper()
	c, status := p.runToEnd(t, append([]containerOption{command("sh", "-c", script)}, opts...)...)
	out := c.output(t)
	if status.ExitCode != 0 {
		t.Fatalf("%s: exit code %d, output:\n%s", script, status.ExitCode, out)
	}
	return out
}

func (c *container) start(t *testing.T) {
	t.Helper()
	if err := c.pod.d.cri.StartContainer(t.Context(), c.id); err != nil {
		t.Fatalf("start container %s: %v", c.config.Metadata.Name, err)
	}
}

func (c *container) stop(t *testing.T, grace int64) {
	t.Helper()
	must(t, c.pod.d.cri.StopContainer(t.Context(), c.id, grace))
}

func (c *container) status(t *testing.T) *runtimeapi.ContainerStatus {
	t.Helper()
	response, err := c.pod.d.cri.ContainerStatus(t.Context(), c.id, false)
	must(t, err)
	return response.Status
}

func (c *container) waitState(t *testing.T, state runtimeapi.ContainerState) *runtimeapi.ContainerStatus {
	t.Helper()
	var status *runtimeapi.ContainerStatus
	eventually(t, c.config.Metadata.Name+" is "+state.String(), func() error {
		if status = c.status(t); status.State != state {
			return unexpected("the state", status.State, state)
		}
		return nil
	})
	return status
}

func (c *container) waitExited(t *testing.T) *runtimeapi.ContainerStatus {
	t.Helper()
	return c.waitState(t, runtimeapi.ContainerState_CONTAINER_EXITED)
}

// exec runs a command in the container, which must succeed, and returns its
// standard output without the last newline.
func (c *container) exec(t *testing.T, cmd ...string) string {
	t.Helper()
	stdout, stderr, err := c.pod.d.cri.ExecSync(t.Context(), c.id, cmd, time.Minute)
	if err != nil {
		t.Fatalf("exec %q: %v\n%s%s", cmd, err, stdout, stderr)
	}
	return strings.TrimSuffix(string(stdout), "\n")
}

// exitCode returns the exit code in an error of ExecSync, or -1.
func exitCode(err error) int {
	var e interface{ ExitStatus() int }
	if errors.As(err, &e) {
		return e.ExitStatus()
	}
	return -1
}

func command(args ...string) containerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Command, c.Args = args, nil }
}

func script(s string) containerOption { return command("sh", "-c", s) }

func image(name string) containerOption {
	return func(c *runtimeapi.ContainerConfig) {
		c.Image = &runtimeapi.ImageSpec{Image: name, UserSpecifiedImage: name}
	}
}

// imageDefaults leaves command and arguments to the image.
func imageDefaults(c *runtimeapi.ContainerConfig) { c.Command, c.Args = nil, nil }

func containerNamed(name string) containerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Metadata.Name = name }
}

func env(key, value string) containerOption {
	return func(c *runtimeapi.ContainerConfig) {
		c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: key, Value: []byte(value)})
	}
}

func mount(m *runtimeapi.Mount) containerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Mounts = append(c.Mounts, m) }
}

func security(change func(*runtimeapi.LinuxContainerSecurityContext)) containerOption {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
}

func resources(change func(*runtimeapi.LinuxContainerResources)) containerOption {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.Resources) }
}

func runAs(uid int64) containerOption {
	return security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUser = &runtimeapi.Int64Value{Value: uid} })
}

func privileged(s *runtimeapi.LinuxContainerSecurityContext) { s.Privileged = true }

// --- images -------------------------------------------------------------------

func (d *daemon) pull(t *testing.T, image string) string {
	t.Helper()
	ref, err := d.images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: image}, nil, nil)
	if err != nil {
		t.Fatalf("pull %s: %v", image, err)
	}
	return ref
}

func (d *daemon) tryPull(t *testing.T, image string, auth *runtimeapi.AuthConfig) (string, error) {
	t.Helper()
	return d.images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: image}, auth, nil)
}

// imageStatus returns nil for an image the daemon does not have.
func (d *daemon) imageStatus(t *testing.T, image string) *runtimeapi.Image {
	t.Helper()
	response, err := d.images.ImageStatus(t.Context(), &runtimeapi.ImageSpec{Image: image}, false)
	must(t, err)
	return response.Image
}

func (d *daemon) ensureImage(t *testing.T, image string) {
	t.Helper()
	if strings.HasPrefix(image, registry.Host) && d.imageStatus(t, image) == nil {
		d.pull(t, image)
	}
}

// --- logs ---------------------------------------------------------------------

// logLine is one record of a CRI log.
type logLine struct {
	time    time.Time
	stream  string
	partial bool
	text    string
}

func (c *container) logPath() string {
	return filepath.Join(c.pod.config.LogDirectory, c.config.LogPath)
}

// log parses the container's log.
func (c *container) log(t *testing.T) []logLine {
	t.Helper()
	return readLog(t, c.logPath())
}

func readLog(t *testing.T, path string) []logLine {
	t.Helper()
	content, err := os.ReadFile(path)
	must(t, err)
	var lines []logLine
	for text := range strings.Lines(string(content)) {
		fields := strings.SplitN(strings.TrimSuffix(text, "\n"), " ", 4)
		if len(fields) != 4 || !strings.HasSuffix(text, "\n") {
			t.Fatalf("%s: not a CRI log record: %q", path, text)
		}
		at, err := time.Parse(time.RFC3339Nano, fields[0])
		must(t, err)
		if fields[2] != "F" && fields[2] != "P" {
			t.Fatalf("%s: tag is neither F nor P: %q", path, text)
		}
		lines = append(lines, logLine{time: at, stream: fields[1], partial: fields[2] == "P", text: fields[3]})
	}
	return lines
}

// output returns what the container wrote, from its log.
func (c *container) output(t *testing.T) string {
	t.Helper()
	return joinLog(c.log(t))
}

func joinLog(lines []logLine) string {
	var out strings.Builder
	for _, l := range lines {
		out.WriteString(l.text)
		if !l.partial {
			out.WriteByte('\n')
		}
	}
	return out.String()
}

// waitOutput waits until the container has written text.
func (c *container) waitOutput(t *testing.T, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s writes %q", c.config.Metadata.Name, text), func() error {
		if out := c.output(t); !strings.Contains(out, text) {
			return fmt.Errorf("it wrote %q", out)
		}
		return nil
	})
}

func contains(s, part string) bool { return strings.Contains(s, part) }
