package state

import (
	"crypto/rand"
	"encoding/hex"
	"path/filepath"
)

// NewID returns a new pod or container ID of 64 hex digits.
func NewID() string {
	var b [32]byte
	rand.Read(b[:]) // never fails, see crypto/rand
	return hex.EncodeToString(b[:])
}

// IsID reports whether a directory name has the form of an ID.
func IsID(name string) bool {
	b, err := hex.DecodeString(name)
	return err == nil && len(b) == 32
}

// Dirs names the directories of pods and containers.
type Dirs struct {
	Root   string // durable state
	State  string // state of the current boot
	NetNSs string // pins of network namespaces
}

// Below Root:

// PodFiles marks an ID as a pod's, even after a reboot. A pod of version 0.2.0 or earlier has its
// resolv.conf, hosts and hostname there.
func (d Dirs) PodFiles(podID string) string { return filepath.Join(d.Root, "sandboxes", podID) }

// Writable is the writable layer of a container, or of a pause from an image.
func (d Dirs) Writable(id string) string { return filepath.Join(d.Root, "rootfs", id) }

// Volumes holds the directories of a container's anonymous volumes, beside the upper directory of
// its writable layer. So they belong to the same quota project and end with the layer.
func (d Dirs) Volumes(id string) string { return filepath.Join(d.Writable(id), "volumes") }

// Trash holds directories that are being deleted, on the filesystem of the writable layers.
func (d Dirs) Trash() string { return d.Writable("trash") }

// OldTrash is the trash of version 0.1.0.
func (d Dirs) OldTrash() string { return filepath.Join(d.Root, "trash") }

// Checkpoints has a record of each checkpoint in progress, and a directory for the files of each
// checkpoint of one container. Both end with the checkpoint.
func (d Dirs) Checkpoints() string { return filepath.Join(d.Root, "checkpoints") }

// EmptyLayer is an empty layer.
func (d Dirs) EmptyLayer() string { return filepath.Join(d.Root, "empty") }

// Below State:

// RunID is the file with the ID of this state directory (see Run).
func (d Dirs) RunID() string { return filepath.Join(d.State, "run-id") }

// Events holds the journal of events and the positions of its clients (package server/journal).
func (d Dirs) Events() string { return filepath.Join(d.State, "events") }

// Shim is the shim directory of a container or pause.
func (d Dirs) Shim(id string) string { return filepath.Join(d.State, "c", id) }

// Libcontainer is the directory of libcontainer's state.
func (d Dirs) Libcontainer() string { return filepath.Join(d.State, "libcontainer") }

// OCI is the directory in which an OCI runtime keeps its state of a pod.
func (d Dirs) OCI(podID string) string { return filepath.Join(d.State, "oci", podID) }

// SharedMounts holds the mounts of pods. Mounts made there also reach running launchers.
func (d Dirs) SharedMounts() string { return filepath.Join(d.State, "pods") }

// PodMounts holds the mounts of one pod.
func (d Dirs) PodMounts(podID string) string { return filepath.Join(d.SharedMounts(), podID) }

// Tmpfs is the mount point of a pod's tmpfs. Its size bounds the files that containers write there.
// They count as memory of the containers.
func (d Dirs) Tmpfs(podID string) string { return filepath.Join(d.PodMounts(podID), "tmpfs") }

// Etc is the directory of a pod's resolv.conf, hosts and hostname.
func (d Dirs) Etc(podID string) string { return filepath.Join(d.Tmpfs(podID), "etc") }

// Shm is a pod's /dev/shm.
func (d Dirs) Shm(podID string) string { return filepath.Join(d.Tmpfs(podID), "shm") }

// OldShm is a pod's /dev/shm of version 0.2.0 or earlier.
func (d Dirs) OldShm(podID string) string { return filepath.Join(d.PodMounts(podID), "shm") }

// UserNS is the pin of a pod's user namespace.
func (d Dirs) UserNS(podID string) string { return filepath.Join(d.PodMounts(podID), "userns") }

// Elsewhere:

// netnsPrefix distinguishes berth's network namespaces from those of other programs.
const netnsPrefix = "berth-"

// NetNS is the pin of a pod's network namespace.
func (d Dirs) NetNS(podID string) string { return filepath.Join(d.NetNSs, netnsPrefix+podID) }

// RootPlace is the mount point for root filesystems of containers with a user namespace. Each
// launcher mounts there in its own mount namespace, so the directory stays empty. It lies beside
// the state directory, because libcontainer opens it as root of the user namespace, which may not
// traverse the state directory.
func (d Dirs) RootPlace() string { return d.State + "-rootfs" }
