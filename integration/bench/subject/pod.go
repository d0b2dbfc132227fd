package subject

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod is a pod on a subject.
type Pod struct {
	ID         string
	Containers []string // IDs

	s      *Subject
	config *runtimeapi.PodSandboxConfig
}

// Span is one call. All spans of a pod count time from the same moment.
type Span struct {
	Name       string
	Begin, End time.Duration
	Depth      int // number of enclosing spans
}

// Start holds the spans of a pod's start.
type Start struct{ Spans []Span }

// Total returns the time until the container runs.
func (t Start) Total() time.Duration {
	var sum time.Duration
	for _, s := range t.Spans {
		sum += s.End - s.Begin
	}
	return sum
}

// Start starts a pod of one container, on the host's network or in a network namespace. Clean
// removes the parts of a failed start.
func (s *Subject) Start(ctx context.Context, hostNetwork bool) (*Pod, Start, error) {
	var t Start
	begin := time.Now()
	call := func(name string, f func() error) error {
		span := Span{Name: name, Begin: time.Since(begin)}
		if err := f(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		span.End = time.Since(begin)
		t.Spans = append(t.Spans, span)
		return nil
	}
	p, err := s.newPod(hostNetwork)
	if err != nil {
		return nil, t, err
	}
	if err := call("RunPodSandbox", func() error { return p.run(ctx) }); err != nil {
		return nil, t, err
	}
	if err := call("CreateContainer", func() error { return p.CreateContainer(ctx) }); err != nil {
		return p, t, err
	}
	return p, t, call("StartContainer", func() error { return s.startContainer(ctx, p.Containers[0]) })
}

// StartService pulls an image and starts a pod on the host's network with one container of it. It
// returns the duration of the pull. The pod is not nil if it was created.
func (s *Subject) StartService(ctx context.Context, image string, command []string) (p *Pod, pulled time.Duration, err error) {
	if pulled, err = s.Pull(ctx, image); err != nil {
		return nil, 0, err
	}
	if p, err = s.RunSandbox(ctx, true); err != nil {
		return nil, 0, err
	}
	config := p.containerConfig(command)
	config.Image.Image = image
	if err := p.create(ctx, config); err != nil {
		return p, 0, fmt.Errorf("CreateContainer: %w", err)
	}
	if err := s.startContainer(ctx, p.Containers[0]); err != nil {
		return p, 0, fmt.Errorf("StartContainer: %w", err)
	}
	return p, pulled, nil
}

// RunSandbox makes a pod without containers.
func (s *Subject) RunSandbox(ctx context.Context, hostNetwork bool) (*Pod, error) {
	p, err := s.newPod(hostNetwork)
	if err != nil {
		return nil, err
	}
	if err := p.run(ctx); err != nil {
		return nil, fmt.Errorf("RunPodSandbox: %w", err)
	}
	return p, nil
}

func (s *Subject) newPod(hostNetwork bool) (*Pod, error) {
	name := fmt.Sprintf("bench-%d-%d", os.Getpid(), s.next.Add(1))
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		Labels:       labels(),
		LogDirectory: filepath.Join(s.logs, name),
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    s.parent,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: namespaces(hostNetwork)},
		},
	}
	if !hostNetwork {
		config.Hostname = name
	}
	return &Pod{s: s, config: config}, os.MkdirAll(config.LogDirectory, 0o755)
}

func namespaces(hostNetwork bool) *runtimeapi.NamespaceOption {
	o := &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_POD, Pid: runtimeapi.NamespaceMode_CONTAINER}
	if hostNetwork {
		o.Network = runtimeapi.NamespaceMode_NODE
	}
	return o
}

func (p *Pod) run(ctx context.Context) error {
	r, err := p.s.cri.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: p.config})
	if err != nil {
		return err
	}
	p.ID = r.PodSandboxId
	return nil
}

// resources returns the resources of a BestEffort container. Where cgroup v2 has no controller for
// processor time, a runtime cannot set shares.
func resources() *runtimeapi.LinuxContainerResources {
	r := &runtimeapi.LinuxContainerResources{CpuShares: 2, OomScoreAdj: 1000}
	if controllers, ok := Controllers(); ok && !slices.Contains(controllers, "cpu") {
		r.CpuShares = 0
	}
	return r
}

// CreateContainer creates one more container and does not start it.
func (p *Pod) CreateContainer(ctx context.Context) error {
	return p.create(ctx, p.containerConfig(p.s.Command))
}

// containerConfig returns the configuration of the pod's next container.
func (p *Pod) containerConfig(command []string) *runtimeapi.ContainerConfig {
	name := fmt.Sprintf("c%d", len(p.Containers))
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: p.s.Image, UserSpecifiedImage: p.s.Image},
		Command:  command,
		Labels:   labels(),
		LogPath:  name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       resources(),
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: p.config.Linux.SecurityContext.NamespaceOptions},
		},
	}
}

func (p *Pod) create(ctx context.Context, config *runtimeapi.ContainerConfig) error {
	r, err := p.s.cri.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, SandboxConfig: p.config, Config: config})
	if err != nil {
		return err
	}
	p.Containers = append(p.Containers, r.ContainerId)
	return nil
}

// startContainer starts a container by its ID.
func (s *Subject) startContainer(ctx context.Context, id string) error {
	_, err := s.cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id})
	return err
}

// Trace returns the runtime's own spans of each call for this pod. Only berth has them.
func (p *Pod) Trace(ctx context.Context) (map[string][]Span, error) {
	r, err := p.s.cri.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.ID, Verbose: true})
	if err != nil {
		return nil, fmt.Errorf("PodSandboxStatus: %w", err)
	}
	text, ok := r.Info["trace"]
	if !ok {
		return nil, nil
	}
	return parseTrace(text)
}

// parseTrace parses the output of berth trace --output json.
func parseTrace(text string) (map[string][]Span, error) {
	var operations []struct {
		Spans []struct {
			Name       string
			Depth      int
			From, Took int64 // nanoseconds
		}
	}
	if err := json.Unmarshal([]byte(text), &operations); err != nil {
		return nil, fmt.Errorf("trace of a pod: %w", err)
	}
	all := map[string][]Span{}
	for _, o := range operations {
		for _, s := range o.Spans[min(1, len(o.Spans)):] { // the first span is the call itself
			call := o.Spans[0].Name
			all[call] = append(all[call], Span{Name: s.Name, Depth: s.Depth, Begin: time.Duration(s.From), End: time.Duration(s.From + s.Took)})
		}
	}
	return all, nil
}

// StopContainer stops the first container, whose process exits on SIGTERM, and returns the
// duration.
func (p *Pod) StopContainer(ctx context.Context) (time.Duration, error) {
	const grace = 10 // seconds
	begin := time.Now()
	_, err := p.s.cri.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: p.Containers[0], Timeout: grace})
	if err != nil {
		return 0, fmt.Errorf("StopContainer: %w", err)
	}
	took := time.Since(begin)
	if took >= grace*time.Second {
		return 0, fmt.Errorf("StopContainer took %v: the process did not exit on SIGTERM", took)
	}
	return took, nil
}

// RemoveContainer removes the first container.
func (p *Pod) RemoveContainer(ctx context.Context) error {
	_, err := p.s.cri.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: p.Containers[0]})
	if err != nil {
		return fmt.Errorf("RemoveContainer: %w", err)
	}
	return nil
}

// Stop stops the pod and returns the duration.
func (p *Pod) Stop(ctx context.Context) (time.Duration, error) {
	begin := time.Now()
	if _, err := p.s.cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		return 0, fmt.Errorf("StopPodSandbox: %w", err)
	}
	return time.Since(begin), nil
}

// AwaitReady waits until the containers' processes are ready for SIGTERM. Each is the first process
// of its PID namespace, so the kernel drops a signal that the process does not handle yet.
func (s *Subject) AwaitReady(ctx context.Context) error {
	for {
		ready, err := allReady()
		if ready || err != nil {
			return err
		}
		if err := wait(ctx, time.Millisecond); err != nil {
			return fmt.Errorf("wait until the container is ready: %w", err)
		}
	}
}

// allReady reports whether the containers' processes exist and are ready for SIGTERM.
func allReady() (bool, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return false, err
	}
	found := false
	for _, dir := range dirs {
		cmdline, err := os.ReadFile(dir + "/cmdline")
		if err != nil || !strings.Contains(string(cmdline), workMark) || strings.HasPrefix(string(cmdline), "sleep\x00") {
			continue // exited, no container, or a child of the container's shell
		}
		status, err := os.ReadFile(dir + "/status")
		if err != nil {
			return false, nil // exited
		}
		if !expectsTerm(string(status)) {
			return false, nil
		}
		found = true
	}
	return found, nil
}

// expectsTerm reports from /proc/PID/status whether a process is ready for SIGTERM. It either
// catches SIGTERM or is a pause that sleeps in sigtimedwait, which removes the signal from the
// mask.
func expectsTerm(status string) bool {
	const term = 1 << (unix.SIGTERM - 1)
	waits, sleeps := false, false
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch name {
		case "Name":
			waits = value == TermWaiter
		case "State":
			sleeps = strings.HasPrefix(value, "S")
		case "SigCgt":
			if mask, err := strconv.ParseUint(value, 16, 64); err == nil && mask&term != 0 {
				return true
			}
		}
	}
	return waits && sleeps
}

// Remove stops and removes the pod.
func (p *Pod) Remove(ctx context.Context) error {
	if _, err := p.Stop(ctx); err != nil {
		return err
	}
	if _, err := p.s.cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.ID}); err != nil {
		return fmt.Errorf("RemovePodSandbox: %w", err)
	}
	return nil
}

// Exec runs true in the first container and returns the duration.
func (p *Pod) Exec(ctx context.Context) (time.Duration, error) {
	begin := time.Now()
	r, err := p.s.cri.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: p.Containers[0], Cmd: []string{"true"}, Timeout: 10})
	if err != nil {
		return 0, fmt.Errorf("ExecSync: %w", err)
	}
	if r.ExitCode != 0 {
		return 0, fmt.Errorf("ExecSync: true exits with %d: %s", r.ExitCode, r.Stderr)
	}
	return time.Since(begin), nil
}

// Status requests the first container's status and returns the duration.
func (p *Pod) Status(ctx context.Context) (time.Duration, error) {
	begin := time.Now()
	r, err := p.s.cri.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: p.Containers[0]})
	if err != nil {
		return 0, fmt.Errorf("ContainerStatus: %w", err)
	}
	took := time.Since(begin)
	if state := r.Status.GetState(); state != runtimeapi.ContainerState_CONTAINER_RUNNING {
		return 0, fmt.Errorf("ContainerStatus: the container is %v", state)
	}
	return took, nil
}

// ListContainers lists all containers and returns their number and the duration.
func (s *Subject) ListContainers(ctx context.Context) (int, time.Duration, error) {
	begin := time.Now()
	r, err := s.cri.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return 0, 0, fmt.Errorf("ListContainers: %w", err)
	}
	return len(r.Containers), time.Since(begin), nil
}

// CountPods returns the number of the benchmark's pods that the runtime lists.
func (s *Subject) CountPods(ctx context.Context) (int, error) {
	return s.countPods(ctx, &runtimeapi.PodSandboxFilter{LabelSelector: labels()})
}

// CountAllPods returns the number of the runtime's pods, including pods of other clients.
func (s *Subject) CountAllPods(ctx context.Context) (int, error) { return s.countPods(ctx, nil) }

func (s *Subject) countPods(ctx context.Context, filter *runtimeapi.PodSandboxFilter) (int, error) {
	r, err := s.cri.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: filter})
	if err != nil {
		return 0, fmt.Errorf("ListPodSandbox: %w", err)
	}
	return len(r.Items), nil
}
