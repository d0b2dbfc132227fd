package server

import (
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/users"
	"berth/sandbox/state"
)

// testPod lists the fields of a pod's snapshot that tests set.
type testPod struct {
	ID        string
	Config    *runtimeapi.PodSandboxConfig
	Handler   string
	CreatedAt time.Time
	Ready     bool
	IPs       []string
	NetNS     string
	PausePID  int
	Listed    *state.Answer
}

func (p testPod) snapshot() *state.Pod {
	status := state.NewPodStatus(state.PodStopped)
	if p.Ready {
		status = state.NewPodStatus(state.PodReady)
	}
	status.IPs, status.PausePID = p.IPs, p.PausePID
	spec := &state.PodSpec{ID: p.ID, Config: p.Config, Handler: p.Handler, CreatedAt: p.CreatedAt, NetNS: p.NetNS}
	return &state.Pod{PodSpec: spec, PodStatus: status, Listed: p.Listed}
}

// testContainer lists the fields of a container's snapshot that tests set.
type testContainer struct {
	ID, PodID                        string
	Config                           *runtimeapi.ContainerConfig
	ImageID, ImageRef                string
	State                            runtimeapi.ContainerState
	CreatedAt, StartedAt, FinishedAt time.Time
	ExitCode                         int32
	Reason, Message, LogPath         string
	PID                              int
	User                             users.User
	Resources                        *runtimeapi.LinuxContainerResources
	StopSignal                       string // the image's
	Process                          *specs.Process
	Listed                           *state.Answer
}

var phases = map[runtimeapi.ContainerState]state.Phase{
	runtimeapi.ContainerState_CONTAINER_CREATED: state.ContainerCreated,
	runtimeapi.ContainerState_CONTAINER_RUNNING: state.ContainerRunning,
	runtimeapi.ContainerState_CONTAINER_EXITED:  state.ContainerExited,
}

func (c testContainer) snapshot() *state.Container {
	status := state.NewContainerStatus(phases[c.State])
	status.StartedAt, status.PID, status.User, status.Resources, status.Process = c.StartedAt, c.PID, c.User, c.Resources, c.Process
	if c.State == runtimeapi.ContainerState_CONTAINER_EXITED {
		status.Exit = &state.Exit{Code: c.ExitCode, Reason: c.Reason, Message: c.Message, StartedAt: c.StartedAt, FinishedAt: c.FinishedAt}
	}
	spec := &state.ContainerSpec{ID: c.ID, PodID: c.PodID, Config: c.Config, CreatedAt: c.CreatedAt, LogPath: c.LogPath,
		Image: state.Image{ID: c.ImageID, Ref: c.ImageRef, Config: ocispec.ImageConfig{StopSignal: c.StopSignal}}}
	return &state.Container{ContainerSpec: spec, ContainerStatus: status, Listed: c.Listed}
}

// exitedNow returns a snapshot of the container after its exit.
func exitedNow(c *state.Container) *state.Container {
	status := state.NewContainerStatus(state.ContainerExited)
	status.StartedAt = c.StartedAt
	return &state.Container{ContainerSpec: c.ContainerSpec, ContainerStatus: status, Listed: new(state.Answer)}
}
