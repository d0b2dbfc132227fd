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

// Dirs are the directories that all places are in.
type Dirs struct {
	Root   string // durable state
	State  string // what dies with the boot
	NetNSs string // where network namespaces are pinned
}

// Below Root:

// PodFiles shows that an ID is a pod's, also after a reboot. A pod of 0.2.0 or earlier has its
// resolv.conf, hosts and hostname there.
func (d Dirs) PodFiles(podID string) string { return filepath.Join(d.Root, "sandboxes", podID) }

// Writable has the writable layer of a container, or of a pause that is an image's.
func (d Dirs) Writable(id string) string { return filepath.Join(d.Root, "rootfs", id) }

// Trash holds directories that are being deleted, on the filesystem of the writable layers.
func (d Dirs) Trash() string { return d.Writable("trash") }

// OldTrash is the trash of version 0.1.0.
func (d Dirs) OldTrash() string { return filepath.Join(d.Root, "trash") }

// EmptyLayer is a layer with nothing in it.
func (d Dirs) EmptyLayer() string { return filepath.Join(d.Root, "empty") }

// Below State:

// RunID has the ID of this state directory: see Run.
func (d Dirs) RunID() string { return filepath.Join(d.State, "run-id") }

// Shim is the shim directory of a container or pause.
func (d Dirs) Shim(id string) string { return filepath.Join(d.State, "c", id) }

// Libcontainer has libcontainer's state.
func (d Dirs) Libcontainer() string { return filepath.Join(d.State, "libcontainer") }

// OCI has the state of another runtime for a pod.
func (d Dirs) OCI(podID string) string { return filepath.Join(d.State, "oci", podID) }

// SharedMounts has what launchers see that were started before it was mounted.
func (d Dirs) SharedMounts() string { return filepath.Join(d.State, "pods") }

// PodMounts has a pod's part of these.
func (d Dirs) PodMounts(podID string) string { return filepath.Join(d.SharedMounts(), podID) }

// Tmpfs is the mount point of a pod's tmpfs. Its size bounds the files that containers write there.
// They count as memory of the containers.
func (d Dirs) Tmpfs(podID string) string { return filepath.Join(d.PodMounts(podID), "tmpfs") }

// Etc has a pod's resolv.conf, hosts and hostname.
func (d Dirs) Etc(podID string) string { return filepath.Join(d.Tmpfs(podID), "etc") }

// Shm is a pod's /dev/shm.
func (d Dirs) Shm(podID string) string { return filepath.Join(d.Tmpfs(podID), "shm") }

// OldShm is where 0.2.0 and earlier mounted a pod's /dev/shm.
func (d Dirs) OldShm(podID string) string { return filepath.Join(d.PodMounts(podID), "shm") }

// UserNS is where a pod's user namespace is pinned.
func (d Dirs) UserNS(podID string) string { return filepath.Join(d.PodMounts(podID), "userns") }

// Elsewhere:

// netnsPrefix tells berth's network namespaces from others'.
const netnsPrefix = "berth-"

// NetNS is where a pod's network namespace is pinned.
func (d Dirs) NetNS(podID string) string { return filepath.Join(d.NetNSs, netnsPrefix+podID) }

// RootPlace returns the mount point for root filesystems of containers with a user namespace. Each
// launcher mounts there in its own mount namespace, so the directory stays empty. It lies beside
// the state directory, because libcontainer opens it as root of the user namespace. That user may
// not traverse the state directory.
func (d Dirs) RootPlace() string { return d.State + "-rootfs" }
