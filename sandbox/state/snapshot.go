package state

import (
	"cmp"
	"slices"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/nri"
	"berth/oci"
)

// Pod is a snapshot of a pod.
type Pod struct {
	ID        string
	Config    *runtimeapi.PodSandboxConfig
	Handler   string
	CreatedAt time.Time
	Ready     bool
	IPs       []string // primary first; none with the host's network
	NetNS     string   // path; empty with the host's network
	PausePID  int      // 0 when not Ready
	Sandboxed bool     // its containers run where the node can't see them
	Listed    *Answer
}

// NewPod returns what the record says. config has the pod's resources as they are now.
func NewPod(rec *PodRecord, config *runtimeapi.PodSandboxConfig) *Pod {
	p := &Pod{Listed: new(Answer), ID: rec.ID, Config: config, Handler: rec.Handler, CreatedAt: rec.CreatedAt,
		Ready: rec.Phase == PodReady, IPs: rec.IPs, NetNS: rec.NetNS, Sandboxed: rec.Runtime.IsSandboxed()}
	if p.Ready {
		p.PausePID = rec.PausePID
	}
	return p
}

// Pauseless returns the pod as it is when its pause has ended and it was not stopped yet.
func (p *Pod) Pauseless() *Pod {
	changed := *p
	changed.Ready, changed.PausePID, changed.Listed = false, 0, new(Answer)
	return &changed
}

// Container is a snapshot of a container.
type Container struct {
	ID, PodID  string
	Config     *runtimeapi.ContainerConfig
	ImageID    string
	ImageRef   string // the image's name@digest at the container's creation, or its ID
	State      runtimeapi.ContainerState
	CreatedAt  time.Time
	StartedAt  time.Time // zero until started
	FinishedAt time.Time // zero until exited
	ExitCode   int32
	Reason     string // Completed, Error, OOMKilled, StartError, ShimLost, Unknown
	Message    string
	LogPath    string // absolute; empty: no log is kept
	PID        int    // of the init, on the host; 0 when not running
	User       *runtimeapi.ContainerUser
	Resources  *runtimeapi.LinuxContainerResources
	StopSignal runtimeapi.Signal
	Mounts     []*runtimeapi.Mount // the config's, with the IDs of images

	Process   *specs.Process // what execs derive from
	Described *specs.Spec    // what plugins are told, see describe.ForPlugins
	Limits    *nri.Limits    // set by plugins

	Listed *Answer
}

// NewContainer returns what the record says. resources are the record's, decoded; pid and startedAt are of the init of
// one that runs.
func NewContainer(rec *ContainerRecord, config *runtimeapi.ContainerConfig, resources *runtimeapi.LinuxContainerResources, pid int, startedAt time.Time) *Container {
	c := &Container{Listed: new(Answer), ID: rec.ID, PodID: rec.PodID, Config: config, ImageID: rec.Image.ID, ImageRef: cmp.Or(rec.Image.Ref, rec.Image.ID), CreatedAt: rec.CreatedAt,
		LogPath: rec.LogPath, User: rec.User.CRI(), Resources: resources,
		StopSignal: oci.CRISignal(oci.StopSignal(config.GetStopSignal(), rec.Image.Config.StopSignal)),
		Mounts:     statusMounts(config, rec.Volumes),
		Process:    rec.Process, Described: rec.Described, Limits: rec.Limits}
	switch rec.Phase {
	case ContainerCreated, ContainerStarting:
		c.State = runtimeapi.ContainerState_CONTAINER_CREATED
	case ContainerRunning:
		c.State, c.PID, c.StartedAt = runtimeapi.ContainerState_CONTAINER_RUNNING, pid, startedAt
	default:
		c.State = runtimeapi.ContainerState_CONTAINER_EXITED
	}
	if exit := rec.Exit; exit != nil {
		c.ExitCode, c.Reason, c.Message = exit.Code, exit.Reason, exit.Message
		c.StartedAt, c.FinishedAt = exit.StartedAt, exit.FinishedAt
	}
	return c
}

// statusMounts are the config's mounts with the IDs of the images they are of, which kubelet
// shows in the pod's status (KEP-5365).
func statusMounts(config *runtimeapi.ContainerConfig, volumes []Volume) []*runtimeapi.Mount {
	mounts := slices.Clone(config.GetMounts())
	for _, v := range volumes {
		mount := proto.CloneOf(mounts[v.Mount])
		mount.Image.ImageRef = v.ImageID
		mounts[v.Mount] = mount
	}
	return mounts
}
