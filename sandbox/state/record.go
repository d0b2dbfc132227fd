package state

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint"
	"berth/cni"
	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/userns"
	"berth/oci"
	"berth/oci/confine"
	"berth/oci/users"
	"berth/sandbox/handler"
	shimproto "berth/shim/proto"
)

// Versions of the record formats. A newer berth reads older versions.
const (
	podVersion       = 1
	containerVersion = 1
	runtimeVersion   = 1
)

// podRecord is the format of a pod's Spec and Status on disk.
type podRecord struct {
	ID        string    `json:"id"`
	BootID    string    `json:"bootID"`
	RunID     string    `json:"runID,omitempty"`
	Phase     Phase     `json:"phase"`
	CreatedAt time.Time `json:"createdAt"`
	Config    []byte    `json:"config"` // runtime.v1.PodSandboxConfig, as protobuf
	Handler   string    `json:"handler,omitempty"`
	Resources []byte    `json:"resources,omitempty"` // runtime.v1.UpdatePodSandboxResourcesRequest, as protobuf; nil: as in Config

	Runtime *handler.Runtime `json:"runtime,omitempty"`
	Tmpfs   bool             `json:"tmpfs,omitempty"`

	CgroupsPath string           `json:"cgroupsPath"`
	Mappings    *userns.Mappings `json:"mappings,omitempty"` // nil: the host's user namespace, or a record of version 0.2.0 or earlier
	NetNS       string           `json:"netns,omitempty"`
	Network     *cni.Attachment  `json:"network,omitempty"`
	IPRanges    [][]cni.IPRange  `json:"ipRanges,omitempty"`
	IPs         []string         `json:"ips,omitempty"`

	SELinux    confine.Labels      `json:"selinux,omitzero"`
	Pause      shimproto.PauseKind `json:"pause,omitempty"` // empty: 0.2.0 or earlier made the record
	PauseImage *Image              `json:"pauseImage,omitempty"`
	PausePID   int                 `json:"pausePID,omitempty"`
	PauseStart uint64              `json:"pauseStart,omitempty"`
}

// containerRecord is the format of a container's Spec and Status on disk.
type containerRecord struct {
	ID        string    `json:"id"`
	PodID     string    `json:"podID"`
	BootID    string    `json:"bootID"`
	RunID     string    `json:"runID,omitempty"`
	Phase     Phase     `json:"phase"`
	CreatedAt time.Time `json:"createdAt"`
	Config    []byte    `json:"config"`              // runtime.v1.ContainerConfig, as protobuf
	Resources []byte    `json:"resources,omitempty"` // runtime.v1.LinuxContainerResources in force, as protobuf; nil: as in Config

	Adjustment *nri.Adjustment `json:"adjustment,omitempty"`
	Limits     *nri.Limits     `json:"limits,omitempty"`

	Image       Image          `json:"image"`
	Volumes     []Volume       `json:"volumes,omitempty"`
	User        users.User     `json:"user"`
	Project     uint32         `json:"project,omitempty"`
	CgroupsPath string         `json:"cgroupsPath"`
	LogPath     string         `json:"logPath,omitempty"`
	SELinux     confine.Labels `json:"selinux,omitzero"`
	Process     *specs.Process `json:"process,omitempty"`
	Described   *specs.Spec    `json:"described,omitempty"`

	StartedAt time.Time `json:"startedAt,omitzero"`
	Exit      *Exit     `json:"exit,omitempty"`
}

// Runtime is the record of the settings of UpdateRuntimeConfig.
type Runtime struct {
	PodCIDR string `json:"podCIDR"`
}

// OpenRuntime opens the folder of the runtime record below root.
func OpenRuntime(root string) (*checkpoint.Dir, error) {
	return checkpoint.OpenDir(filepath.Join(root, "runtime"), "runtime", runtimeVersion, checkpoint.Process)
}

// Records stores pods and containers durably. A record is on disk when the method that writes it
// returns.
type Records struct{ pods, containers *checkpoint.Dir }

// OpenRecords opens the folders of records below root. begin registers the wait for each write.
func OpenRecords(root string, begin func(what, object string) func()) (*Records, error) {
	pods, err := checkpoint.OpenDir(filepath.Join(root, "pods"), "pod", podVersion, checkpoint.Process)
	if err != nil {
		return nil, err
	}
	containers, err := checkpoint.OpenDir(filepath.Join(root, "containers"), "container",
		containerVersion, checkpoint.Process)
	if err != nil {
		return nil, err
	}
	pods.Note(begin)
	containers.Note(begin)
	return &Records{pods, containers}, nil
}

// WritePod records a pod. The error is InvalidArgument for a config that cannot be encoded. The
// caller holds the pod's lock.
func (r *Records) WritePod(spec *PodSpec, status *PodStatus) error {
	rec, err := encodePod(spec, status)
	if err != nil {
		return err
	}
	return r.pods.Write(spec.ID, rec)
}

// WriteContainer records a container. The error is InvalidArgument for a config that cannot be
// encoded. The caller holds the container's lock.
func (r *Records) WriteContainer(spec *ContainerSpec, status *ContainerStatus) error {
	rec, err := encodeContainer(spec, status)
	if err != nil {
		return err
	}
	return r.containers.Write(spec.ID, rec)
}

// RemovePod removes the record of a pod. A missing record is no error.
func (r *Records) RemovePod(id string) error { return r.pods.Remove(id) }

// RemoveContainer removes the record of a container. A missing record is no error.
func (r *Records) RemoveContainer(id string) error { return r.containers.Remove(id) }

// LoadPods reads the records of all pods. damaged lists the records that failed their checks. They
// are moved to checkpoint.SetAsideDir.
func (r *Records) LoadPods(add func(*PodSpec, PodStatus)) (damaged []checkpoint.Damaged, err error) {
	return r.pods.Load(func(name string, _ int, body []byte) error {
		spec, status, err := decodePod(name, body)
		if err == nil {
			add(spec, status)
		}
		return err
	})
}

// LoadContainers is LoadPods for containers.
func (r *Records) LoadContainers(add func(*ContainerSpec, ContainerStatus)) (damaged []checkpoint.Damaged, err error) {
	return r.containers.Load(func(name string, _ int, body []byte) error {
		spec, status, err := decodeContainer(name, body)
		if err == nil {
			add(spec, status)
		}
		return err
	})
}

// encodeOnce encodes an object's config unless an earlier write of its record did: the config never
// changes.
func encodeOnce(encoded *[]byte, config proto.Message) (err error) {
	if *encoded == nil {
		*encoded, err = proto.Marshal(config)
	}
	return err
}

func encodePod(spec *PodSpec, status *PodStatus) (*podRecord, error) {
	if err := encodeOnce(&spec.encoded, spec.Config); err != nil {
		return nil, errdefs.InvalidArgument("encode pod config: %w", err)
	}
	var resources []byte
	if status.Resources != nil {
		var err error
		if resources, err = proto.Marshal(status.Resources); err != nil {
			return nil, errdefs.InvalidArgument("encode resources: %w", err)
		}
	}
	return &podRecord{
		ID:          spec.ID,
		BootID:      spec.BootID,
		RunID:       status.RunID,
		Phase:       podRecorded[status.phase],
		CreatedAt:   spec.CreatedAt,
		Config:      spec.encoded,
		Handler:     spec.Handler,
		Resources:   resources,
		Runtime:     spec.Runtime,
		Tmpfs:       spec.Tmpfs,
		CgroupsPath: spec.CgroupsPath,
		Mappings:    spec.Mappings,
		NetNS:       spec.NetNS,
		Network:     status.Network,
		IPRanges:    spec.IPRanges,
		IPs:         status.IPs,
		SELinux:     spec.Labels,
		Pause:       spec.Pause,
		PauseImage:  spec.PauseImage,
		PausePID:    status.PausePID,
		PauseStart:  status.PauseStart,
	}, nil
}

func encodeContainer(spec *ContainerSpec, status *ContainerStatus) (*containerRecord, error) {
	if err := encodeOnce(&spec.encoded, spec.Config); err != nil {
		return nil, errdefs.InvalidArgument("encode container config: %w", err)
	}
	var resources []byte
	if status.Resources != nil && status.Resources != spec.Config.GetLinux().GetResources() {
		var err error
		if resources, err = proto.Marshal(status.Resources); err != nil {
			return nil, errdefs.InvalidArgument("encode resources: %w", err)
		}
	}
	return &containerRecord{
		ID:          spec.ID,
		PodID:       spec.PodID,
		BootID:      spec.BootID,
		RunID:       status.RunID,
		Phase:       containerRecorded[status.phase],
		CreatedAt:   spec.CreatedAt,
		Config:      spec.encoded,
		Resources:   resources,
		Adjustment:  status.Adjustment,
		Limits:      status.Limits,
		Image:       spec.Image,
		Volumes:     spec.Volumes,
		User:        status.User,
		Project:     spec.Project,
		CgroupsPath: spec.CgroupsPath,
		LogPath:     spec.LogPath,
		SELinux:     spec.Labels,
		Process:     status.Process,
		Described:   status.Described,
		StartedAt:   status.StartedAt,
		Exit:        status.Exit,
	}, nil
}

// decodePod decodes the record of the pod with that ID. It derives the fields that earlier versions
// did not record.
func decodePod(id string, body []byte) (*PodSpec, PodStatus, error) {
	var rec podRecord
	if err := json.Unmarshal(body, &rec); err != nil {
		return nil, PodStatus{}, err
	}
	config := &runtimeapi.PodSandboxConfig{}
	if err := proto.Unmarshal(rec.Config, config); err != nil {
		return nil, PodStatus{}, err
	}
	if rec.ID != id || config.Metadata == nil {
		return nil, PodStatus{}, errors.New("not the record of this pod")
	}
	if rec.Mappings == nil { // earlier versions derived them from the config at each use
		var err error
		if rec.Mappings, err = oci.UserNamespace(config); err != nil {
			return nil, PodStatus{}, err
		}
	}
	spec := &PodSpec{
		ID:          rec.ID,
		BootID:      rec.BootID,
		CreatedAt:   rec.CreatedAt,
		Config:      config,
		Handler:     rec.Handler,
		Runtime:     rec.Runtime,
		Tmpfs:       rec.Tmpfs,
		CgroupsPath: rec.CgroupsPath,
		NetNS:       rec.NetNS,
		IPRanges:    rec.IPRanges,
		Mappings:    rec.Mappings,
		Labels:      rec.SELinux,
		Pause:       rec.Pause,
		PauseImage:  rec.PauseImage,
		encoded:     rec.Config,
	}
	status := PodStatus{phase: loadedPodPhase(rec.Phase), RunID: rec.RunID, Network: rec.Network, IPs: rec.IPs,
		PausePID: rec.PausePID, PauseStart: rec.PauseStart}
	if rec.Resources != nil {
		update := &runtimeapi.UpdatePodSandboxResourcesRequest{}
		if err := proto.Unmarshal(rec.Resources, update); err != nil {
			return nil, PodStatus{}, err
		}
		status.SetResources(config, update)
	}
	return spec, status, nil
}

// decodeContainer decodes the record of the container with that ID.
func decodeContainer(id string, body []byte) (*ContainerSpec, ContainerStatus, error) {
	var rec containerRecord
	if err := json.Unmarshal(body, &rec); err != nil {
		return nil, ContainerStatus{}, err
	}
	config := &runtimeapi.ContainerConfig{}
	if err := proto.Unmarshal(rec.Config, config); err != nil {
		return nil, ContainerStatus{}, err
	}
	if rec.ID != id || config.Metadata == nil {
		return nil, ContainerStatus{}, errors.New("not the record of this container")
	}
	resources := config.GetLinux().GetResources()
	if rec.Resources != nil {
		resources = &runtimeapi.LinuxContainerResources{}
		if err := proto.Unmarshal(rec.Resources, resources); err != nil {
			return nil, ContainerStatus{}, err
		}
	}
	spec := &ContainerSpec{
		ID:          rec.ID,
		PodID:       rec.PodID,
		BootID:      rec.BootID,
		CreatedAt:   rec.CreatedAt,
		Config:      config,
		Image:       rec.Image,
		Volumes:     rec.Volumes,
		Project:     rec.Project,
		CgroupsPath: rec.CgroupsPath,
		LogPath:     rec.LogPath,
		Labels:      rec.SELinux,
		encoded:     rec.Config,
	}
	status := ContainerStatus{phase: loadedContainerPhase(rec.Phase, rec.Process != nil), RunID: rec.RunID,
		Resources: resources, Limits: rec.Limits, User: rec.User,
		Adjustment: rec.Adjustment, Process: rec.Process, Described: rec.Described, StartedAt: rec.StartedAt, Exit: rec.Exit}
	return spec, status, nil
}
