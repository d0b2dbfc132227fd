package state

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"runtime"
	"sync"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	"berth/internal/errdefs"
	"berth/oci"
)

// Versions of the record formats. A newer berth reads older versions.
const (
	podVersion       = 1
	containerVersion = 1
	runtimeVersion   = 1
)

// podRecord is the format of a pod's record: its Spec and its Status.
type podRecord struct {
	*PodSpec
	*PodStatus
	Phase     Phase  `json:"phase"`
	Config    []byte `json:"config"`              // runtime.v1.PodSandboxConfig, as protobuf
	Resources []byte `json:"resources,omitempty"` // runtime.v1.UpdatePodSandboxResourcesRequest, as protobuf; nil: as in Config
}

// containerRecord is the format of a container's record: its Spec and its Status.
type containerRecord struct {
	*ContainerSpec
	*ContainerStatus
	Phase     Phase  `json:"phase"`
	Config    []byte `json:"config"`              // runtime.v1.ContainerConfig, as protobuf
	Resources []byte `json:"resources,omitempty"` // runtime.v1.LinuxContainerResources in force, as protobuf; nil: as in Config
}

// Runtime is the record of the settings of UpdateRuntimeConfig.
type Runtime struct {
	PodCIDR string `json:"podCIDR"`
}

// OpenRuntime opens the folder of the runtime record below root.
func OpenRuntime(root string) (*record.Dir, error) {
	return record.OpenDir(filepath.Join(root, "runtime"), "runtime", runtimeVersion, record.Process)
}

// Records stores pods and containers durably. A record is on disk when the method that writes it
// returns.
type Records struct{ pods, containers *record.Dir }

// OpenRecords opens the folders of records below root. begin registers the wait for each write.
func OpenRecords(root string, begin func(what, object string) func()) (*Records, error) {
	pods, err := record.OpenDir(filepath.Join(root, "pods"), "pod", podVersion, record.Process)
	if err != nil {
		return nil, err
	}
	containers, err := record.OpenDir(filepath.Join(root, "containers"), "container",
		containerVersion, record.Process)
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
// are moved to record.SetAsideDir.
func (r *Records) LoadPods(add func(*PodSpec, PodStatus)) (damaged []record.Damaged, err error) {
	return loadAll(r.pods, decodePod, add)
}

// LoadContainers is LoadPods for containers.
func (r *Records) LoadContainers(add func(*ContainerSpec, ContainerStatus)) (damaged []record.Damaged, err error) {
	return loadAll(r.containers, decodeContainer, add)
}

// loadAll decodes records on all processors, because no client is answered meanwhile.
func loadAll[Spec, Status any](dir *record.Dir, decode func(string, []byte) (*Spec, Status, error),
	add func(*Spec, Status)) (damaged []record.Damaged, err error) {
	var adding sync.Mutex
	return dir.LoadParallel(runtime.GOMAXPROCS(0), func(name string, _ int, body []byte) error {
		spec, status, err := decode(name, body)
		if err == nil {
			adding.Lock()
			defer adding.Unlock()
			add(spec, status)
		}
		return err
	})
}

func encodePod(spec *PodSpec, status *PodStatus) (*podRecord, error) {
	config, err := encodeOnce(&spec.encoded, spec.Config)
	if err != nil {
		return nil, errdefs.InvalidArgument("encode pod config: %w", err)
	}
	rec := &podRecord{PodSpec: spec, PodStatus: status, Phase: podRecorded[status.phase], Config: config}
	if status.Resources != nil {
		if rec.Resources, err = proto.Marshal(status.Resources); err != nil {
			return nil, errdefs.InvalidArgument("encode resources: %w", err)
		}
	}
	return rec, nil
}

func encodeContainer(spec *ContainerSpec, status *ContainerStatus) (*containerRecord, error) {
	config, err := encodeOnce(&spec.encoded, spec.Config)
	if err != nil {
		return nil, errdefs.InvalidArgument("encode container config: %w", err)
	}
	rec := &containerRecord{ContainerSpec: spec, ContainerStatus: status,
		Phase: containerRecorded[status.phase], Config: config}
	if status.Resources != nil && status.Resources != spec.Config.GetLinux().GetResources() {
		if rec.Resources, err = proto.Marshal(status.Resources); err != nil {
			return nil, errdefs.InvalidArgument("encode resources: %w", err)
		}
	}
	return rec, nil
}

// encodeOnce encodes an object's config, which never changes, and caches the encoding.
func encodeOnce(encoded *[]byte, config proto.Message) (_ []byte, err error) {
	if *encoded == nil {
		*encoded, err = proto.Marshal(config)
	}
	return *encoded, err
}

// decodePod decodes the record of the pod with that ID. It derives properties that earlier versions
// did not record.
func decodePod(id string, body []byte) (*PodSpec, PodStatus, error) {
	spec, status := &PodSpec{Config: &runtimeapi.PodSandboxConfig{}}, PodStatus{}
	rec := podRecord{PodSpec: spec, PodStatus: &status}
	if err := decode(body, &rec, &rec.Config, spec.Config); err != nil {
		return nil, PodStatus{}, err
	}
	if spec.ID != id || spec.Config.Metadata == nil {
		return nil, PodStatus{}, errors.New("not the record of this pod")
	}
	if spec.Mappings == nil { // earlier versions derived them from the config whenever they needed them
		var err error
		if spec.Mappings, err = oci.UserNamespace(spec.Config); err != nil {
			return nil, PodStatus{}, err
		}
	}
	spec.encoded, status.phase = rec.Config, loadedPodPhase(rec.Phase)
	if rec.Resources != nil {
		update := &runtimeapi.UpdatePodSandboxResourcesRequest{}
		if err := proto.Unmarshal(rec.Resources, update); err != nil {
			return nil, PodStatus{}, err
		}
		status.SetResources(spec.Config, update)
	}
	return spec, status, nil
}

// decodeContainer decodes the record of the container with that ID.
func decodeContainer(id string, body []byte) (*ContainerSpec, ContainerStatus, error) {
	spec, status := &ContainerSpec{Config: &runtimeapi.ContainerConfig{}}, ContainerStatus{}
	rec := containerRecord{ContainerSpec: spec, ContainerStatus: &status}
	if err := decode(body, &rec, &rec.Config, spec.Config); err != nil {
		return nil, ContainerStatus{}, err
	}
	if spec.ID != id || spec.Config.Metadata == nil {
		return nil, ContainerStatus{}, errors.New("not the record of this container")
	}
	spec.encoded, status.phase = rec.Config, loadedContainerPhase(rec.Phase, status.Process != nil)
	status.Resources = spec.Config.GetLinux().GetResources()
	if rec.Resources != nil {
		status.Resources = &runtimeapi.LinuxContainerResources{}
		if err := proto.Unmarshal(rec.Resources, status.Resources); err != nil {
			return nil, ContainerStatus{}, err
		}
	}
	return spec, status, nil
}

// decode decodes a record and its config.
func decode(body []byte, rec any, encoded *[]byte, config proto.Message) error {
	if err := json.Unmarshal(body, rec); err != nil {
		return err
	}
	return proto.Unmarshal(*encoded, config)
}
