// Package rootfs describes a container's root filesystem, which is assembled from layers, and
// mounts it with the new mount API (fsopen, fsmount, move_mount). So a mount can exist as a file
// descriptor without a place in any mount namespace.
package rootfs

import "os"

// Kind is the form of a stored layer.
type Kind string

const (
	// Directory is a layer extracted into a directory, whiteouts in overlayfs' form.
	Directory Kind = "directory"
	// EROFS is a layer (or several merged ones) as an EROFS image file with data files beside it.
	EROFS Kind = "erofs"
)

// Layer is one read-only layer on the host.
type Layer struct {
	Kind Kind     `json:"kind"`
	Path string   `json:"path"`           // the directory, or the EROFS image
	Data []string `json:"data,omitempty"` // EROFS: its data files, in device order

	// Mount is a mount of the EROFS image that is there already, see Open; nil: it is mounted each time.
	Mount *os.File `json:"-"`
	// Passed says, in an order to a launcher, that Mount comes with it.
	Passed bool `json:"passed,omitempty"`
}

// Spec describes a root filesystem. The launcher gets it as JSON.
type Spec struct {
	Layers []Layer `json:"layers"`          // bottom first, at least one
	Upper  string  `json:"upper,omitempty"` // writable layer; empty: the root is read-only
	Work   string  `json:"work,omitempty"`  // overlayfs' work directory, same filesystem as Upper
	Label  string  `json:"label,omitempty"` // SELinux label of all its files, for overlays; empty: each has its own
	IDMap  *IDMap  `json:"idMap,omitempty"` // for MountAt and MakeUpper: whose user namespace it is for; nil: the host's
}
