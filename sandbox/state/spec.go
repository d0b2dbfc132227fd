package state

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/userns"
	"berth/oci/confine"
	"berth/sandbox/handler"
	"berth/shim/proto"
)

// PodSpec holds the planned properties of a pod. It never changes, so any goroutine may read it.
// The tags of Spec and Status name the fields of the record (record.go).
type PodSpec struct {
	ID           string                       `json:"id"`
	BootID       string                       `json:"bootID"` // of the boot at planning
	CreatedAt    time.Time                    `json:"createdAt"`
	Config       *runtimeapi.PodSandboxConfig `json:"-"`                      // as kubelet sent it
	Handler      string                       `json:"handler,omitempty"`      // requested runtime handler
	Runtime      *handler.Runtime             `json:"runtime,omitempty"`      // nil: libcontainer
	Restore      *Restore                     `json:"restore,omitempty"`      // the checkpoint that its sandbox continues, with all processes; nil: none
	Tmpfs        bool                         `json:"tmpfs,omitempty"`        // its files and /dev/shm are on a tmpfs; false: made by version 0.2.0 or earlier
	CgroupsPath  string                       `json:"cgroupsPath"`            // as in the runtime-spec
	NetNS        string                       `json:"netns,omitempty"`        // path of its network namespace; empty: the host's
	IPRanges     [][]cni.IPRange              `json:"ipRanges,omitempty"`     // from the node's pod CIDR
	PreferredIPs []netip.Addr                 `json:"preferredIPs,omitempty"` // addresses to get if they are free; a restored pod had them
	Mappings     *userns.Mappings             `json:"mappings,omitempty"`     // of its user namespace; nil: the host's; versions up to 0.2.0 did not record them
	Labels       confine.Labels               `json:"selinux,omitzero"`       // SELinux; containers without SELinux options share them
	Pause        proto.PauseKind              `json:"pause,omitempty"`        // how its pause is made; empty: recorded by version 0.2.0 or earlier
	PauseImage   *Image                       `json:"pauseImage,omitempty"`   // nil: the embedded pause

	encoded []byte // cached encoding of Config for records; access needs the pod's lock
}

func (s *PodSpec) String() string { return "pod " + s.ID }

// Sandboxed reports whether the node cannot see the processes of the pod's containers.
func (s *PodSpec) Sandboxed() bool { return s.Runtime.IsSandboxed() }

// HasCgroup reports whether the pod has a cgroup, the parent of its containers' cgroups.
func (s *PodSpec) HasCgroup() bool { return s.Config.GetLinux().GetCgroupParent() != "" }

// Identity returns the pod's identity (see PodIdentity).
func (s *PodSpec) Identity() string { return PodIdentity(s.Config.GetMetadata()) }

// ContainerSpec holds the planned properties of a container. It never changes, so any goroutine may
// read it.
type ContainerSpec struct {
	ID          string                      `json:"id"`
	PodID       string                      `json:"podID"`
	BootID      string                      `json:"bootID"` // of the boot at planning
	CreatedAt   time.Time                   `json:"createdAt"`
	Config      *runtimeapi.ContainerConfig `json:"-"` // as kubelet sent it
	Image       Image                       `json:"image"`
	Volumes     []Volume                    `json:"volumes,omitempty"` // image volumes
	Restore     *Restore                    `json:"restore,omitempty"` // the checkpoint that the container continues; nil: it starts anew
	Project     uint32                      `json:"project,omitempty"` // quota project of the writable layer; 0: none
	CgroupsPath string                      `json:"cgroupsPath"`       // as in the runtime-spec
	LogPath     string                      `json:"logPath,omitempty"` // absolute; empty: no log is kept
	Labels      confine.Labels              `json:"selinux,omitzero"`

	encoded []byte // cached encoding of Config for records; access needs the container's lock
}

func (s *ContainerSpec) String() string { return "container " + s.ID }

// Identity returns the container's identity (see ContainerIdentity).
func (s *ContainerSpec) Identity() string { return ContainerIdentity(s.PodID, s.Config.GetMetadata()) }

// Image is a container's copy of its image's data. The image may be removed before the container.
type Image struct {
	ID     string              `json:"id"`
	Ref    string              `json:"ref,omitempty"` // name@digest; empty: the image had no name, or the record is of version 0.2.0 or earlier
	Layers []digest.Digest     `json:"layers"`
	Config ocispec.ImageConfig `json:"config"`
}

// Volume is an image that a container mounts as a volume (KEP-4639). The image may be removed
// before the container, but its layers stay.
type Volume struct {
	Mount   int             `json:"mount"` // index in the config's mounts
	ImageID string          `json:"imageID"`
	Layers  []digest.Digest `json:"layers"`
}

// Holder returns the name under which a container holds the volume's layers. Each volume needs a
// different holder, because a holder holds the layers of one image.
func (v Volume) Holder(containerID string) string {
	return fmt.Sprintf("%s volume %d", containerID, v.Mount)
}
