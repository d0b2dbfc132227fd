package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint"
	"berth/cni"
	"berth/internal/nri"
	"berth/oci/confine"
	"berth/oci/users"
	"berth/sandbox/handler"
)

// Schema versions of the records. A newer berth reads older versions.
const (
	podVersion       = 1
	containerVersion = 1
	runtimeVersion   = 1
)

type Phase string

const (
	PodStarting Phase = "starting" // effects may exist; the pod was never reported
	PodReady    Phase = "ready"
	PodStopped  Phase = "stopped" // no process, no network
	Removing    Phase = "removing"

	ContainerCreated  Phase = "created"
	ContainerStarting Phase = "starting" // a launcher was asked; its shim directory tells how far it got
	ContainerRunning  Phase = "running"
	ContainerExited   Phase = "exited"
)

// PodRecord is what is known of a pod on disk: the checkpoint of its config, and
// the names of everything that exists for it and does not follow from its ID.
type PodRecord struct {
	ID        string    `json:"id"`
	BootID    string    `json:"bootID"`          // nothing of it but files and addresses outlives the boot
	RunID     string    `json:"runID,omitempty"` // of the state directory (Run), nor that; empty in records of earlier versions
	Phase     Phase     `json:"phase"`
	CreatedAt time.Time `json:"createdAt"`
	Config    []byte    `json:"config"` // runtime.v1.PodSandboxConfig, as protobuf
	Handler   string    `json:"handler,omitempty"`
	Resources []byte    `json:"resources,omitempty"` // runtime.v1.UpdatePodSandboxResourcesRequest, as protobuf; nil: as in Config

	Runtime *handler.Runtime `json:"runtime,omitempty"` // nil: libcontainer

	Tmpfs bool `json:"tmpfs,omitempty"` // its files and /dev/shm are on a tmpfs of its own; false: 0.2.0 or earlier made it

	CgroupsPath string          `json:"cgroupsPath"`
	NetNS       string          `json:"netns,omitempty"`   // empty: the host's
	Network     *cni.Attachment `json:"network,omitempty"` // set before ADD, cleared after DEL
	IPRanges    [][]cni.IPRange `json:"ipRanges,omitempty"`
	IPs         []string        `json:"ips,omitempty"`

	SELinux    confine.Labels `json:"selinux,omitzero"`     // containers without options of their own share them
	PauseImage *Image         `json:"pauseImage,omitempty"` // nil: the embedded pause
	PausePID   int            `json:"pausePID,omitempty"`
	PauseStart uint64         `json:"pauseStart,omitempty"` // start time, clock ticks
}

// Image is what a container keeps of its image, which may be removed before it.
type Image struct {
	ID     string              `json:"id"`
	Ref    string              `json:"ref,omitempty"` // name@digest; empty: the image had none, or 0.2.0 or earlier made the record
	Layers []digest.Digest     `json:"layers"`
	Config ocispec.ImageConfig `json:"config"`
}

// ContainerRecord is what is known of a container on disk.
type ContainerRecord struct {
	ID        string    `json:"id"`
	PodID     string    `json:"podID"`
	BootID    string    `json:"bootID"`
	RunID     string    `json:"runID,omitempty"` // as in Pod
	Phase     Phase     `json:"phase"`
	CreatedAt time.Time `json:"createdAt"`
	Config    []byte    `json:"config"`              // runtime.v1.ContainerConfig, as protobuf
	Resources []byte    `json:"resources,omitempty"` // runtime.v1.LinuxContainerResources in force, as protobuf

	Adjustment *nri.Adjustment `json:"adjustment,omitempty"` // what plugins changed at its creation
	Limits     *nri.Limits     `json:"limits,omitempty"`     // in force, set by plugins

	Image       Image          `json:"image"`
	Volumes     []Volume       `json:"volumes,omitempty"` // images mounted as volumes
	User        users.User     `json:"user"`
	Project     uint32         `json:"project,omitempty"` // of the writable layer, in the quotas of its filesystem; 0: none
	CgroupsPath string         `json:"cgroupsPath"`
	LogPath     string         `json:"logPath,omitempty"`
	SELinux     confine.Labels `json:"selinux,omitzero"`
	Process     *specs.Process `json:"process,omitempty"`   // what execs derive from
	Described   *specs.Spec    `json:"described,omitempty"` // what plugins are told of it besides Process

	StartedAt time.Time `json:"startedAt,omitzero"` // when the start began; the shim directory has the moment
	Exit      *Exit     `json:"exit,omitempty"`
}

// Exit is how a container ended.
type Exit struct {
	Code       int32     `json:"code"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message,omitempty"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt"`
}

// Volume is what a container keeps of an image that it has as a volume
// (KEP-4639). The image may be removed before the container; its layers stay.
type Volume struct {
	Mount   int             `json:"mount"` // index in the config's mounts
	ImageID string          `json:"imageID"`
	Layers  []digest.Digest `json:"layers"`
}

// Holder is the name under which the layers are held for a container. Each volume has one
// of its own, since a holder has one image's layers.
func (v Volume) Holder(containerID string) string {
	return fmt.Sprintf("%s volume %d", containerID, v.Mount)
}

// Runtime is what UpdateRuntimeConfig told.
type Runtime struct {
	PodCIDR string `json:"podCIDR"`
}

// OpenPods, OpenContainers and OpenRuntime open the folders of records below root.
func OpenPods(root string) (*checkpoint.Dir, error) {
	return checkpoint.OpenDir(filepath.Join(root, "pods"), "pod", podVersion, checkpoint.Process)
}

func OpenContainers(root string) (*checkpoint.Dir, error) {
	return checkpoint.OpenDir(filepath.Join(root, "containers"), "container", containerVersion, checkpoint.Process)
}

func OpenRuntime(root string) (*checkpoint.Dir, error) {
	return checkpoint.OpenDir(filepath.Join(root, "runtime"), "runtime", runtimeVersion, checkpoint.Process)
}

// ReadPod decodes the record of the pod with that ID. update is nil if its resources are those of config.
func ReadPod(id string, body []byte) (rec PodRecord, config *runtimeapi.PodSandboxConfig, update *runtimeapi.UpdatePodSandboxResourcesRequest, err error) {
	if err = json.Unmarshal(body, &rec); err != nil {
		return rec, nil, nil, err
	}
	config = &runtimeapi.PodSandboxConfig{}
	if err = proto.Unmarshal(rec.Config, config); err != nil {
		return rec, nil, nil, err
	}
	if rec.ID != id || config.Metadata == nil {
		return rec, nil, nil, errors.New("not the record of this pod")
	}
	if rec.Resources != nil {
		update = &runtimeapi.UpdatePodSandboxResourcesRequest{}
		err = proto.Unmarshal(rec.Resources, update)
	}
	return rec, config, update, err
}

// ReadContainer decodes the record of the container with that ID. resources are those in force.
func ReadContainer(id string, body []byte) (rec ContainerRecord, config *runtimeapi.ContainerConfig, resources *runtimeapi.LinuxContainerResources, err error) {
	if err = json.Unmarshal(body, &rec); err != nil {
		return rec, nil, nil, err
	}
	config = &runtimeapi.ContainerConfig{}
	if err = proto.Unmarshal(rec.Config, config); err != nil {
		return rec, nil, nil, err
	}
	if rec.ID != id || config.Metadata == nil {
		return rec, nil, nil, errors.New("not the record of this container")
	}
	resources = config.GetLinux().GetResources()
	if rec.Resources != nil {
		resources = &runtimeapi.LinuxContainerResources{}
		err = proto.Unmarshal(rec.Resources, resources)
	}
	return rec, config, resources, err
}

// Reasons of an exit, as kubelet and users of other runtimes know them.
const (
	ReasonCompleted  = "Completed"
	ReasonError      = "Error"
	ReasonOOMKilled  = "OOMKilled"
	ReasonStartError = "StartError"
	ReasonShimLost   = "ShimLost" // the shim was killed, and the exit code with it
	ReasonUnknown    = "Unknown"  // the machine went down
)

// CodeUnknown is what everybody reports where nobody saw the exit.
const CodeUnknown = 255

// CodeStartError is the exit code of a container that never ran.
const CodeStartError = 128
