package subject

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Checkpointer saves and restores containers in one way. Its containers run Ticker.
type Checkpointer interface {
	// Run starts a container for each directory, which is its /ticks.
	Run(ctx context.Context, ticks ...string) error
	// Save writes the containers' state into an empty directory. They go on.
	Save(ctx context.Context, dir string) error
	// Archive writes the state of the first container to a tar. It is on the disk afterwards.
	Archive(ctx context.Context, file string) error
	// Restore starts a second container from the state of the first one in a directory, and returns
	// the time at which its start began. ticks is its /ticks.
	Restore(ctx context.Context, dir, ticks string) (time.Time, error)
	// CPU returns the CPU time of the programs and the containers so far.
	CPU() (time.Duration, error)
	// Remove removes all containers.
	Remove(ctx context.Context) error
}

// ticksDir is where the containers of a Checkpointer have their directory.
const ticksDir = "/ticks"

// CRI is a Checkpointer that uses the CRI.
type CRI struct {
	s        *Subject
	command  []string
	pod      *Pod
	configs  []*runtimeapi.ContainerConfig
	restored []*Pod
}

// NewCRI returns a Checkpointer whose containers run a command. They share a pod with a network
// namespace.
func (s *Subject) NewCRI(command []string) *CRI { return &CRI{s: s, command: command} }

// Run implements Checkpointer.
func (c *CRI) Run(ctx context.Context, ticks ...string) error {
	var err error
	if c.pod, err = c.s.RunSandbox(ctx, false); err != nil {
		return err
	}
	for i, dir := range ticks {
		config := c.pod.containerConfig(c.command)
		config.Mounts = []*runtimeapi.Mount{{HostPath: dir, ContainerPath: ticksDir}}
		config.Linux.Resources.CpuShares = 1024 // the container should wait little for a processor
		if err := c.pod.create(ctx, config); err != nil {
			return fmt.Errorf("CreateContainer: %w", err)
		}
		c.configs = append(c.configs, config)
		if err := c.s.startContainer(ctx, c.pod.Containers[i]); err != nil {
			return fmt.Errorf("StartContainer: %w", err)
		}
	}
	return nil
}

// Save implements Checkpointer with CheckpointPod. The files are on the disk afterwards.
func (c *CRI) Save(ctx context.Context, dir string) error {
	_, err := c.s.cri.CheckpointPod(ctx, &runtimeapi.CheckpointPodRequest{
		PodSandboxId: c.pod.ID, OutputPath: dir, ContainerIds: c.pod.Containers,
	})
	return err
}

// Archive implements Checkpointer with CheckpointContainer.
func (c *CRI) Archive(ctx context.Context, file string) error {
	_, err := c.s.cri.CheckpointContainer(ctx, &runtimeapi.CheckpointContainerRequest{
		ContainerId: c.pod.Containers[0], Location: file,
	})
	return err
}

// Restore implements Checkpointer. The start is StartContainer; RestorePod is not part of it.
func (c *CRI) Restore(ctx context.Context, dir, ticks string) (began time.Time, err error) {
	p, err := c.s.newPod(false)
	if err != nil {
		return began, err
	}
	config := proto.CloneOf(c.configs[0])
	config.Mounts[0].HostPath = ticks
	r, err := c.s.cri.RestorePod(ctx, &runtimeapi.RestorePodRequest{
		CheckpointPath: dir, Config: p.config, ContainerConfigs: []*runtimeapi.ContainerConfig{config},
	})
	if err != nil {
		return began, fmt.Errorf("RestorePod: %w", err)
	}
	p.ID = r.PodSandboxId
	c.restored = append(c.restored, p)
	began = time.Now()
	if err := c.s.startContainer(ctx, r.RestoredContainers[0].ContainerId); err != nil {
		return began, fmt.Errorf("StartContainer: %w", err)
	}
	return began, nil
}

// CPU implements Checkpointer.
func (c *CRI) CPU() (time.Duration, error) { return c.s.CPU() }

// Remove implements Checkpointer.
func (c *CRI) Remove(ctx context.Context) error {
	for _, p := range append(c.restored, c.pod) {
		if p == nil {
			continue
		}
		if err := p.Remove(ctx); err != nil {
			return err
		}
	}
	c.pod, c.configs, c.restored = nil, nil, nil
	return nil
}
