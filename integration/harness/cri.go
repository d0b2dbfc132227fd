package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/logs"
)

// --- pods ---------------------------------------------------------------------

// Pod is a sandbox made by a test.
type Pod struct {
	D      *Daemon
	Id     string
	Config *runtimeapi.PodSandboxConfig
}

type PodOption func(*runtimeapi.PodSandboxConfig)

// PodConfig returns a pod's configuration as kubelet would send it.
func (d *Daemon) PodConfig(t *testing.T, opts ...PodOption) *runtimeapi.PodSandboxConfig {
	t.Helper()
	n := d.pods.Add(1)
	uid := fmt.Sprintf("uid-%d", n)
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: fmt.Sprintf("pod-%d", n), Namespace: "default", Uid: uid},
		Hostname:     fmt.Sprintf("pod-%d", n),
		LogDirectory: filepath.Join(d.LogDir, uid),
		Labels:       map[string]string{},
		Annotations:  map[string]string{},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: d.CgroupParent(uid),
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
			},
		},
	}
	for _, opt := range opts {
		opt(config)
	}
	Must(t, os.MkdirAll(config.LogDirectory, 0o755))
	return config
}

// RunPod runs a pod and expects success.
func (d *Daemon) RunPod(t *testing.T, opts ...PodOption) *Pod {
	t.Helper()
	return d.RunPodConfig(t, d.PodConfig(t, opts...))
}

func (d *Daemon) RunPodConfig(t *testing.T, config *runtimeapi.PodSandboxConfig) *Pod {
	t.Helper()
	id, err := d.Cri.RunPodSandbox(t.Context(), config, "")
	if err != nil {
		t.Fatalf("run pod %s: %v", config.Metadata.Name, err)
	}
	d.Objects = append(d.Objects, id)
	return &Pod{D: d, Id: id, Config: config}
}

func (p *Pod) Status(t *testing.T) *runtimeapi.PodSandboxStatus {
	t.Helper()
	response := Get(p.D.Cri.PodSandboxStatus(t.Context(), p.Id, false))(t)
	return response.Status
}

func (p *Pod) Stop(t *testing.T) {
	t.Helper()
	Must(t, p.D.Cri.StopPodSandbox(context.WithoutCancel(t.Context()), p.Id))
}

func (p *Pod) Remove(t *testing.T) {
	t.Helper()
	p.Stop(t)
	Must(t, p.D.Cri.RemovePodSandbox(context.WithoutCancel(t.Context()), p.Id))
}

func (p *Pod) Ip(t *testing.T) string { t.Helper(); return p.Status(t).Network.GetIp() }

func PodLabel(key, value string) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { c.Labels[key] = value }
}

func PodNamed(name string) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = name }
}

func PodSecurity(change func(*runtimeapi.LinuxSandboxSecurityContext)) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { change(c.Linux.SecurityContext) }
}

// HostNetwork puts the pod into the node's network namespace.
func HostNetwork(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
	c.Hostname = "" // kubelet sends no hostname
}

func HostPID(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_NODE
}

func HostIPC(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_NODE
}

// SharedPID makes the pod's containers share one PID namespace.
func SharedPID(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
}

func Sysctl(name, value string) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		if c.Linux.Sysctls == nil {
			c.Linux.Sysctls = map[string]string{}
		}
		c.Linux.Sysctls[name] = value
	}
}

func HostPort(port, containerPort int32, protocol runtimeapi.Protocol) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.PortMappings = append(c.PortMappings, &runtimeapi.PortMapping{Protocol: protocol, ContainerPort: containerPort, HostPort: port})
	}
}

// --- containers ---------------------------------------------------------------

// Container is a container made by a test.
type Container struct {
	Pod    *Pod
	Id     string
	Config *runtimeapi.ContainerConfig
}

type ContainerOption func(*runtimeapi.ContainerConfig)

// ContainerConfig returns the configuration of a container that sleeps.
func (p *Pod) ContainerConfig(opts ...ContainerOption) *runtimeapi.ContainerConfig {
	n := p.D.pods.Add(1)
	name := fmt.Sprintf("c%d", n)
	namespaces := p.Config.Linux.SecurityContext.NamespaceOptions
	config := &runtimeapi.ContainerConfig{
		Metadata:    &runtimeapi.ContainerMetadata{Name: name},
		Image:       &runtimeapi.ImageSpec{Image: BaseImage, UserSpecifiedImage: BaseImage},
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

// Create creates a container and expects success. It pulls a missing image.
func (p *Pod) Create(t *testing.T, opts ...ContainerOption) *Container {
	t.Helper()
	c, err := p.TryCreate(t, opts...)
	if err != nil {
		t.Fatalf("create container %s: %v", c.Config.Metadata.Name, err)
	}
	return c
}

func (p *Pod) TryCreate(t *testing.T, opts ...ContainerOption) (*Container, error) {
	t.Helper()
	config := p.ContainerConfig(opts...)
	p.D.EnsureImage(t, config.Image.Image)
	if config.LogPath != "" && filepath.IsLocal(config.LogPath) {
		Must(t, os.MkdirAll(filepath.Dir(filepath.Join(p.Config.LogDirectory, config.LogPath)), 0o755))
	}
	id, err := p.D.Cri.CreateContainer(t.Context(), p.Id, config, p.Config)
	if err == nil {
		p.D.Objects = append(p.D.Objects, id)
	}
	return &Container{Pod: p, Id: id, Config: config}, err
}

// Run creates and starts a container and expects success.
func (p *Pod) Run(t *testing.T, opts ...ContainerOption) *Container {
	t.Helper()
	c := p.Create(t, opts...)
	c.Start(t)
	return c
}

// RunToEnd runs a container until it exits, and returns it and its final status.
func (p *Pod) RunToEnd(t *testing.T, opts ...ContainerOption) (*Container, *runtimeapi.ContainerStatus) {
	t.Helper()
	c := p.Run(t, opts...)
	return c, c.WaitExited(t)
}

// Sh runs a script in a container, expects exit code 0, and returns the output.
func (p *Pod) Sh(t *testing.T, script string, opts ...ContainerOption) string {
	t.Helper()
	c, status := p.RunToEnd(t, append([]ContainerOption{Command("sh", "-c", script)}, opts...)...)
	out := c.Output(t)
	if status.ExitCode != 0 {
		t.Fatalf("%s: exit code %d, output:\n%s", script, status.ExitCode, out)
	}
	return out
}

func (c *Container) Start(t *testing.T) {
	t.Helper()
	if err := c.Pod.D.Cri.StartContainer(t.Context(), c.Id); err != nil {
		t.Fatalf("start container %s: %v", c.Config.Metadata.Name, err)
	}
}

func (c *Container) Stop(t *testing.T, grace int64) {
	t.Helper()
	Must(t, c.Pod.D.Cri.StopContainer(t.Context(), c.Id, grace))
}

func (c *Container) Status(t *testing.T) *runtimeapi.ContainerStatus {
	t.Helper()
	response := Get(c.Pod.D.Cri.ContainerStatus(t.Context(), c.Id, false))(t)
	return response.Status
}

func (c *Container) waitState(t *testing.T, state runtimeapi.ContainerState) *runtimeapi.ContainerStatus {
	t.Helper()
	var status *runtimeapi.ContainerStatus
	EventuallyGot(t, c.Config.Metadata.Name+" is "+state.String(), func() (bool, any) { status = c.Status(t); return status.State == state, status })
	return status
}

func (c *Container) WaitExited(t *testing.T) *runtimeapi.ContainerStatus {
	t.Helper()
	return c.waitState(t, runtimeapi.ContainerState_CONTAINER_EXITED)
}

// Exec runs a command in the container, expects success, and returns its standard output without
// the last newline.
func (c *Container) Exec(t *testing.T, cmd ...string) string {
	t.Helper()
	stdout, stderr, err := c.Pod.D.Cri.ExecSync(t.Context(), c.Id, cmd, time.Minute)
	if err != nil {
		t.Fatalf("exec %q: %v\n%s%s", cmd, err, stdout, stderr)
	}
	return strings.TrimSuffix(string(stdout), "\n")
}

// ExecURL requests a session that runs a command.
func (c *Container) ExecURL(t *testing.T, o remotecommand.StreamOptions, cmd ...string) string {
	t.Helper()
	response, err := c.Pod.D.Cri.Exec(t.Context(), &runtimeapi.ExecRequest{ContainerId: c.Id, Cmd: cmd,
		Tty: o.Tty, Stdin: o.Stdin != nil, Stdout: o.Stdout != nil, Stderr: o.Stderr != nil})
	Must(t, err)
	return response.Url
}

// AttachURL requests an attach session.
func (c *Container) AttachURL(t *testing.T, o remotecommand.StreamOptions) string {
	t.Helper()
	response, err := c.Pod.D.Cri.Attach(t.Context(), &runtimeapi.AttachRequest{ContainerId: c.Id,
		Tty: o.Tty, Stdin: o.Stdin != nil, Stdout: o.Stdout != nil, Stderr: o.Stderr != nil})
	Must(t, err)
	return response.Url
}

// Release creates a file in the container, for which the container's command waits. It ignores
// errors, because the container's exit may kill touch.
func (c *Container) Release(t *testing.T, path string) {
	t.Helper()
	_, stderr, err := c.Pod.D.Cri.ExecSync(t.Context(), c.Id, []string{"touch", path}, time.Minute)
	if err != nil && ExitCode(err) != 128+int(syscall.SIGKILL) {
		t.Fatalf("touch %s: %v\n%s", path, err, stderr)
	}
}

// ExitCode returns the exit code in an error of ExecSync, or -1.
func ExitCode(err error) int {
	var e interface{ ExitStatus() int }
	if errors.As(err, &e) {
		return e.ExitStatus()
	}
	return -1
}

func Command(args ...string) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Command, c.Args = args, nil }
}

func Script(s string) ContainerOption { return Command("sh", "-c", s) }

func Image(name string) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		c.Image = &runtimeapi.ImageSpec{Image: name, UserSpecifiedImage: name}
	}
}

// ImageDefaults leaves command and arguments to the image.
func ImageDefaults(c *runtimeapi.ContainerConfig) { c.Command, c.Args = nil, nil }

func ContainerNamed(name string) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Metadata.Name = name }
}

func Env(key, value string) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		c.Envs = append(c.Envs, &runtimeapi.KeyValue{Key: key, Value: []byte(value)})
	}
}

func Mount(m *runtimeapi.Mount) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Mounts = append(c.Mounts, m) }
}

func Security(change func(*runtimeapi.LinuxContainerSecurityContext)) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
}

func Resources(change func(*runtimeapi.LinuxContainerResources)) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.Resources) }
}

func RunAs(uid int64) ContainerOption {
	return Security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUser = &runtimeapi.Int64Value{Value: uid} })
}

func Privileged(s *runtimeapi.LinuxContainerSecurityContext) { s.Privileged = true }

// --- images -------------------------------------------------------------------

func Cdi(names ...string) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		for _, name := range names {
			c.CDIDevices = append(c.CDIDevices, &runtimeapi.CDIDevice{Name: "vendor.example/dev=" + name})
		}
	}
}

// WithStdin opens the container's stdin. If once, it is closed after the first session.
func WithStdin(once bool) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, once }
}

func WithTerminal(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true }

func (d *Daemon) Pull(t *testing.T, image string) string {
	t.Helper()
	ref, err := d.Images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: image}, nil, nil)
	if err != nil {
		t.Fatalf("pull %s: %v", image, err)
	}
	return ref
}

func (d *Daemon) TryPull(t *testing.T, image string, auth *runtimeapi.AuthConfig) (string, error) {
	t.Helper()
	return d.Images.PullImage(t.Context(), &runtimeapi.ImageSpec{Image: image}, auth, nil)
}

// ImageStatus returns nil if the daemon does not have the image.
func (d *Daemon) ImageStatus(t *testing.T, image string) *runtimeapi.Image {
	t.Helper()
	response := Get(d.Images.ImageStatus(t.Context(), &runtimeapi.ImageSpec{Image: image}, false))(t)
	return response.Image
}

func (d *Daemon) EnsureImage(t *testing.T, image string) {
	t.Helper()
	if strings.HasPrefix(image, Registry.Host) && d.ImageStatus(t, image) == nil {
		d.Pull(t, image)
	}
}

// --- logs ---------------------------------------------------------------------

func (c *Container) LogPath() string {
	return filepath.Join(c.Pod.Config.LogDirectory, c.Config.LogPath)
}

// Log parses the container's log.
func (c *Container) Log(t *testing.T) []logs.Line {
	t.Helper()
	return logs.Read(t, c.LogPath())
}

// Output returns the container's output, read from its log.
func (c *Container) Output(t *testing.T) string {
	t.Helper()
	return logs.Text(c.Log(t))
}

// WaitOutput waits until the container has written text.
func (c *Container) WaitOutput(t *testing.T, text string) {
	t.Helper()
	EventuallyGot(t, fmt.Sprintf("%s writes %q", c.Config.Metadata.Name, text), func() (bool, any) {
		out := c.Output(t)
		return strings.Contains(out, text), out
	})
}

func Contains(s, part string) bool { return strings.Contains(s, part) }
