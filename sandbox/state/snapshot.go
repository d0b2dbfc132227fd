package state

import (
	"cmp"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci"
)

// Pod is an immutable snapshot of a pod: its Spec and a copy of its Status.
type Pod struct {
	*PodSpec
	PodStatus
	Listed *Answer
}

// Snapshot returns a snapshot of the pod. The caller holds the pod's lock.
func (s *PodStatus) Snapshot(spec *PodSpec) *Pod {
	p := &Pod{PodSpec: spec, PodStatus: *s, Listed: new(Answer)}
	if s.phase != PodReady {
		p.PausePID = 0
	}
	return p
}

// Ready reports whether containers can be started in the pod.
func (p *Pod) Ready() bool { return p.phase == PodReady }

// ShownConfig returns the pod's config with the resources of the last update.
func (p *Pod) ShownConfig() *runtimeapi.PodSandboxConfig {
	if p.shown != nil {
		return p.shown
	}
	return p.Config
}

// Container is an immutable snapshot of a container: its Spec and a copy of its Status.
type Container struct {
	*ContainerSpec
	ContainerStatus
	Listed *Answer
}

// Snapshot returns a snapshot of the container. pid and startedAt describe the init of a running
// container. The caller holds the container's lock.
func (s *ContainerStatus) Snapshot(spec *ContainerSpec, pid int, startedAt time.Time) *Container {
	c := &Container{ContainerSpec: spec, ContainerStatus: *s, Listed: new(Answer)}
	c.PID, c.StartedAt = 0, time.Time{}
	switch {
	case s.phase == ContainerRunning:
		c.PID, c.StartedAt = pid, startedAt
	case s.Exit != nil:
		c.StartedAt = s.Exit.StartedAt
	}
	return c
}

// State returns the CRI state of the container.
func (c *Container) State() runtimeapi.ContainerState {
	switch c.phase {
	case ContainerCreating, ContainerCreated, ContainerStarting:
		return runtimeapi.ContainerState_CONTAINER_CREATED
	case ContainerRunning:
		return runtimeapi.ContainerState_CONTAINER_RUNNING
	}
	return runtimeapi.ContainerState_CONTAINER_EXITED
}

// Ended returns the container's exit, or the zero Exit before it.
func (c *Container) Ended() Exit {
	if c.Exit == nil {
		return Exit{}
	}
	return *c.Exit
}

// ImageRef returns the image's name@digest at the container's creation, or its ID.
func (c *Container) ImageRef() string { return cmp.Or(c.Image.Ref, c.Image.ID) }

// StopSignal returns the stop signal of the container.
func (c *Container) StopSignal() runtimeapi.Signal {
	return oci.CRISignal(oci.StopSignal(c.Config.GetStopSignal(), c.Image.Config.StopSignal))
}

// Mounts returns the config's mounts. Image mounts have the image IDs, which kubelet shows in the
// pod's status (KEP-5365).
func (c *Container) Mounts() []*runtimeapi.Mount {
	mounts := slices.Clone(c.Config.GetMounts())
	for _, v := range c.Volumes {
		mount := proto.CloneOf(mounts[v.Mount])
		mount.Image.ImageRef = v.ImageID
		mounts[v.Mount] = mount
	}
	return mounts
}
