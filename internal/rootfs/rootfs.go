// Package rootfs describes a container's root filesystem, which consists of layers, and mounts it
// with the new mount API (fsopen, fsmount, move_mount). With this API a mount can be a file
// descriptor that no mount namespace contains.
package rootfs

import "os"

// Kind is the form of a stored layer.
type Kind string

const (
	// Directory is a layer extracted into a directory, with whiteouts in overlayfs' form.
	Directory Kind = "directory"
	// EROFS is an EROFS image file with separate data files. It is a layer, or several merged
	// layers.
	EROFS Kind = "erofs"
)

// Layer is one read-only layer on the host.
type Layer struct {
	Kind Kind     `json:"kind"`
	Path string   `json:"path"`           // the directory, or the EROFS image
	Data []string `json:"data,omitempty"` // data files of the EROFS image, in device order

	// Mount is an existing mount of the EROFS image, see Open; nil: Spec.Mount mounts the image.
	Mount *os.File `json:"-"`
	// Passed means that the sender of a launch request also passes Mount to the launcher.
	Passed bool `json:"passed,omitempty"`
}

// Spec describes a root filesystem. The launcher receives it as JSON.
type Spec struct {
	Layers []Layer `json:"layers"`          // bottom first, at least one
	Upper  string  `json:"upper,omitempty"` // writable layer; empty: the root is read-only
	Work   string  `json:"work,omitempty"`  // overlayfs' work directory, on the same filesystem as Upper
	Label  string  `json:"label,omitempty"` // SELinux label of all files, for overlays; empty: the files keep their labels
	IDMap  *IDMap  `json:"idMap,omitempty"` // for MountAt and MakeUpper: the mapping of the user namespace; nil: no mapping

	// Keep are files that must stay open as long as a process uses the root filesystem. If a layer
	// is incomplete, they are the files of fill.Engine.Keep. Otherwise there are none. Their owner
	// is the Engine.
	Keep []*os.File `json:"-"`
}
