package state

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	"berth/cni"
	"berth/oci"
)

// Stage is the progress of an object according to its record.
type Stage string

// The stages. While an object is being made or removed, each of its recorded parts may be missing.
const (
	BeingMade    Stage = "being made" // no client has its ID
	Created      Stage = "created"    // a container that was not started
	Running      Stage = "running"    // a ready pod, or a started container, which may have exited since
	Ended        Stage = "ended"      // a stopped pod or an exited container
	BeingRemoved Stage = "being removed"
)

// The stages of recorded phases.
var (
	podStages = map[Phase]Stage{
		PodStarting: BeingMade,
		PodReady:    Running,
		PodStopping: Ended,
		Removing:    BeingRemoved,
	}
	containerStages = map[Phase]Stage{
		ContainerCreating: BeingMade,
		ContainerCreated:  Created,
		ContainerStarting: Running,
		ContainerRunning:  Running,
		ContainerExited:   Ended,
		Removing:          BeingRemoved,
	}
)

// FoundPod lists the parts of a recorded pod.
type FoundPod struct {
	ID          string
	BootID      string
	RunID       string // "": an earlier version wrote the record
	Stage       Stage
	Config      *runtimeapi.PodSandboxConfig
	Program     bool   // a runtime program runs it, not libcontainer
	CgroupsPath string // as in the runtime-spec
	NetNS       string // pin of its network namespace; "": the node's
	UserNS      string // pin of its user namespace; "": the node's
	Tmpfs       string // mount point of its tmpfs; "": no tmpfs
	Etc         string // directory of its resolv.conf, hosts and hostname
	Network     *cni.Attachment
	Undo        *Undo // failed attempts to undo it; nil: none
	IPs         []string
	PausePID    int
	PauseStart  uint64          // clock ticks
	Layers      []digest.Digest // held for its pause
}

// FoundContainer lists the parts of a recorded container.
type FoundContainer struct {
	ID          string
	PodID       string
	BootID      string
	RunID       string // "": an earlier version wrote the record
	Stage       Stage
	Config      *runtimeapi.ContainerConfig
	CgroupsPath string // as in the runtime-spec
	ImageID     string
	ImageRef    string          // image_ref of CRI answers
	Layers      []digest.Digest // held for its image and image volumes
	Anonymous   []oci.AnonymousVolume
}

// Found holds the contents of all records below a root directory.
type Found struct {
	Pods       map[string]*FoundPod
	Containers map[string]*FoundContainer
	Surveys    []record.Survey // of all folders
}

// Inspect reads the records below root without changing them, even of a running daemon.
func Inspect(root, state string) (*Found, error) {
	return inspect(Dirs{Root: root, State: state}, record.Inspect)
}

// InspectOne is Inspect for the records of the pod or container with that ID.
func InspectOne(root, state, id string) (*Found, error) {
	return inspect(Dirs{Root: root, State: state},
		func(path, kind string, version int, decode decoder) (record.Survey, error) {
			return record.InspectOne(path, id, kind, version, decode)
		})
}

type (
	// decoder decodes the body of a record.
	decoder = func(name string, version int, body []byte) error
	// reader reads records of a folder.
	reader = func(path, kind string, version int, decode decoder) (record.Survey, error)
)

// inspect calls read for each folder of records.
func inspect(dirs Dirs, read reader) (*Found, error) {
	r := &Found{Pods: map[string]*FoundPod{}, Containers: map[string]*FoundContainer{}}
	for _, folder := range []struct {
		name, kind string
		version    int
		decode     decoder
	}{
		{"pods", "pod", podVersion, func(name string, _ int, body []byte) error { return r.addPod(dirs, name, body) }},
		{"containers", "container", containerVersion, r.addContainer},
		{"runtime", "runtime", runtimeVersion, func(_ string, _ int, body []byte) error {
			return json.Unmarshal(body, &Runtime{})
		}},
	} {
		survey, err := read(filepath.Join(dirs.Root, folder.name), folder.kind, folder.version, folder.decode)
		if err != nil {
			return nil, err
		}
		r.Surveys = append(r.Surveys, survey)
	}
	return r, nil
}

// IDs returns the IDs of all recorded pods and containers, including damaged records.
func IDs(root string) ([]string, error) {
	var ids []string
	for _, folder := range recordFolders {
		entries, err := os.ReadDir(filepath.Join(root, folder))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list the records below %s: %w", root, err)
		}
		for _, e := range entries {
			if id, _, _ := strings.Cut(e.Name(), "."); IsID(id) {
				ids = append(ids, id)
			}
		}
	}
	return ids, nil
}

// PodCIDR returns the recorded pod CIDR, even of a running daemon. It is empty if there is no
// record, or if the record is damaged.
func PodCIDR(root string) (cidr string, err error) {
	_, err = record.Inspect(filepath.Join(root, "runtime"), "runtime", runtimeVersion,
		func(_ string, _ int, body []byte) error {
			var rec Runtime
			err := json.Unmarshal(body, &rec)
			cidr = rec.PodCIDR
			return err
		})
	return cidr, err
}

func (r *Found) addPod(dirs Dirs, name string, body []byte) error {
	spec, status, err := decodePod(name, body)
	if err != nil {
		return err
	}
	p := &FoundPod{
		ID:          spec.ID,
		BootID:      spec.BootID,
		RunID:       status.RunID,
		Config:      spec.Config,
		Program:     spec.Runtime != nil,
		CgroupsPath: spec.CgroupsPath,
		NetNS:       spec.NetNS,
		Network:     status.Network,
		Undo:        status.Undo,
		IPs:         status.IPs,
		PausePID:    status.PausePID,
		PauseStart:  status.PauseStart,
		Stage:       podStages[status.phase],
	}
	if p.Stage == "" {
		return errors.New("the recorded phase is unknown")
	}
	if spec.Mappings != nil {
		p.UserNS = dirs.UserNS(p.ID)
	}
	switch {
	case spec.Tmpfs:
		p.Tmpfs, p.Etc = dirs.Tmpfs(p.ID), dirs.Etc(p.ID)
	case HostIPC(spec.Config):
		p.Etc = dirs.PodFiles(p.ID)
	default:
		p.Tmpfs, p.Etc = dirs.OldShm(p.ID), dirs.PodFiles(p.ID)
	}
	if spec.PauseImage != nil {
		p.Layers = spec.PauseImage.Layers
	}
	r.Pods[p.ID] = p
	return nil
}

func (r *Found) addContainer(name string, _ int, body []byte) error {
	spec, status, err := decodeContainer(name, body)
	if err != nil {
		return err
	}
	c := &FoundContainer{
		ID:          spec.ID,
		PodID:       spec.PodID,
		BootID:      spec.BootID,
		RunID:       status.RunID,
		Config:      spec.Config,
		CgroupsPath: spec.CgroupsPath,
		ImageID:     spec.Image.ID,
		ImageRef:    cmp.Or(spec.Image.Ref, spec.Image.ID),
		Layers:      spec.Image.Layers,
		Stage:       containerStages[status.phase],
		Anonymous:   status.Anonymous,
	}
	if c.Stage == "" {
		return errors.New("the recorded phase is unknown")
	}
	for _, v := range spec.Volumes {
		c.Layers = append(c.Layers[:len(c.Layers):len(c.Layers)], v.Layers...)
	}
	r.Containers[c.ID] = c
	return nil
}
