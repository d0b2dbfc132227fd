package sandbox

import (
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/cni"
	"berth/internal/nri"
	"berth/oci"
	"berth/sandbox/handler"
)

// Schema versions of the records. A newer berth reads older versions.
const (
	podVersion       = 1
	containerVersion = 1
)

type phase string

const (
	podStarting phase = "starting" // effects may exist; the pod was never reported
	podReady    phase = "ready"
	podStopped  phase = "stopped" // no process, no network
	removing    phase = "removing"

	containerCreated  phase = "created"
	containerStarting phase = "starting" // a launcher was asked; its shim directory tells how far it got
	containerRunning  phase = "running"
	containerExited   phase = "exited"
)

// podRecord is what is known of a pod on disk: the checkpoint of its config, and
// the names of everything that exists for it and does not follow from its ID.
type podRecord struct {
	ID        string    `json:"id"`
	BootID    string    `json:"bootID"` // nothing of it but files and addresses outlives the boot
	Phase     phase     `json:"phase"`
	CreatedAt time.Time `json:"createdAt"`
	Config    []byte    `json:"config"` // runtime.v1.PodSandboxConfig, as protobuf
	Handler   string    `json:"handler,omitempty"`
	Resources []byte    `json:"resources,omitempty"` // runtime.v1.UpdatePodSandboxResourcesRequest, as protobuf; nil: as in Config

	Runtime *handler.Runtime `json:"runtime,omitempty"` // nil: libcontainer

	CgroupsPath string          `json:"cgroupsPath"`
	NetNS       string          `json:"netns,omitempty"`   // empty: the host's
	Network     *cni.Attachment `json:"network,omitempty"` // set before ADD, cleared after DEL
	IPRanges    [][]cni.IPRange `json:"ipRanges,omitempty"`
	IPs         []string        `json:"ips,omitempty"`

	SELinux    oci.Labels   `json:"selinux,omitzero"`     // containers without options of their own share them
	PauseImage *imageRecord `json:"pauseImage,omitempty"` // nil: the embedded pause
	PausePID   int          `json:"pausePID,omitempty"`
	PauseStart uint64       `json:"pauseStart,omitempty"` // start time, clock ticks
}

// imageRecord is what a container keeps of its image, which may be removed before it.
type imageRecord struct {
	ID     string              `json:"id"`
	Layers []digest.Digest     `json:"layers"`
	Config ocispec.ImageConfig `json:"config"`
}

// containerRecord is what is known of a container on disk.
type containerRecord struct {
	ID        string    `json:"id"`
	PodID     string    `json:"podID"`
	BootID    string    `json:"bootID"`
	Phase     phase     `json:"phase"`
	CreatedAt time.Time `json:"createdAt"`
	Config    []byte    `json:"config"`              // runtime.v1.ContainerConfig, as protobuf
	Resources []byte    `json:"resources,omitempty"` // runtime.v1.LinuxContainerResources in force, as protobuf

	Adjustment *nri.Adjustment `json:"adjustment,omitempty"` // what plugins changed at its creation
	Limits     *nri.Limits     `json:"limits,omitempty"`     // in force, set by plugins

	Image       imageRecord    `json:"image"`
	Volumes     []volumeRecord `json:"volumes,omitempty"` // images mounted as volumes
	User        oci.User       `json:"user"`
	CgroupsPath string         `json:"cgroupsPath"`
	LogPath     string         `json:"logPath,omitempty"`
	SELinux     oci.Labels     `json:"selinux,omitzero"`
	Process     *specs.Process `json:"process,omitempty"`   // what execs derive from
	Described   *specs.Spec    `json:"described,omitempty"` // what plugins are told of it besides Process

	StartedAt time.Time   `json:"startedAt,omitzero"` // when the start began; the shim directory has the moment
	Exit      *exitRecord `json:"exit,omitempty"`
}

// exitRecord is how a container ended.
type exitRecord struct {
	Code       int32     `json:"code"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message,omitempty"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt"`
}
