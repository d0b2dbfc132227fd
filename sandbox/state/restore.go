package state

import (
	"path/filepath"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// RestoreRequest is a pod to create from a checkpoint.
type RestoreRequest struct {
	Path       string // of the checkpoint, absolute
	Config     *runtimeapi.PodSandboxConfig
	Handler    string
	Containers []*runtimeapi.ContainerConfig // of exactly the containers in the checkpoint
}

// Restored is a container that RestorePod has created.
type Restored struct{ Name, ID string }

// Restore says that a container, or the sandbox of a pod, continues a checkpoint. A checkpoint of a
// sandbox is in the directory of its container.
type Restore struct {
	Name string `json:"name"` // the directory of the container in the checkpoint; "." in a checkpoint of a single container
	From string `json:"from"` // path of the checkpoint in the request
}

// Checkpoint is berth's copy of the checkpoint that a pod continues. It is below the pod's ID,
// which names everything that the pod owns.
func (d Dirs) Checkpoint(podID string) string { return filepath.Join(d.Writable(podID), "checkpoint") }

// CheckpointOf is the part of a container in its pod's checkpoint. It is removed when the container
// has started.
func (d Dirs) CheckpointOf(podID string, r *Restore) string {
	return filepath.Join(d.Checkpoint(podID), r.Name)
}

// RestoreMode says which containers CRIU may restore (checkpoint.restore).
type RestoreMode string

const (
	RestoreOff     RestoreMode = "off"     // none
	RestoreUserns  RestoreMode = "userns"  // restores of pods with a user namespace, inside of this namespace
	RestoreTrusted RestoreMode = "trusted" // all restores; CRIU trusts the saved processes with root on the node
)

// Permit returns FailedPrecondition if CRIU may not restore containers of a pod. mapped says that
// the pod has a user namespace.
func (m RestoreMode) Permit(mapped bool) error {
	switch {
	case m == RestoreTrusted || m == RestoreUserns && mapped:
		return nil
	case m == RestoreUserns:
		return errdefs.FailedPrecondition("checkpoint.restore is userns, and the pod has no user namespace (hostUsers: false): " +
			"CRIU would restore its processes as root of the node, and trust what they had in memory. " +
			`Read docs/checkpoint.md before you set checkpoint.restore = "trusted"`)
	}
	return errdefs.FailedPrecondition("checkpoint.restore is off: CRIU trusts what the processes had in memory. " +
		"Read docs/checkpoint.md before you change checkpoint.restore")
}

// CheckRestorable returns FailedPrecondition for settings of a container that CRIU cannot restore.
func CheckRestorable(config *runtimeapi.ContainerConfig) error {
	name := config.GetMetadata().GetName()
	for _, mount := range config.GetMounts() {
		if mount.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE {
			return errdefs.FailedPrecondition(
				"container %s: a restore does not support the propagation %s of the mount at %s",
				name, mount.GetPropagation(), mount.GetContainerPath())
		}
	}
	if config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() == runtimeapi.NamespaceMode_TARGET {
		return errdefs.FailedPrecondition(
			"container %s: a restore does not support the PID namespace of another container", name)
	}
	return nil
}
