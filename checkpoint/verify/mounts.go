package verify

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// maxMounts limits the mounts of a container.
const maxMounts = 4096

// checkMounts checks that the images have exactly the mounts that the launcher makes for the spec:
// each once, below the right parent. A mount with a key is external: CRIU binds what the launcher
// passes for the key, so its source is that of the spec.
func (c *check) checkMounts() error {
	m := &mountCheck{check: c, byID: map[uint32]*mnt.MntEntry{}, byPath: map[string]*mnt.MntEntry{}}
	for id, name := range c.images.numbered("mountpoints") {
		mounts, err := entriesOf[mnt.MntEntry](c.images, name, "MNTS", nil)
		if err != nil {
			return err
		}
		if id != c.first.GetMntNsId() {
			c.differ("image "+name, "a second mount namespace", "one")
		}
		m.all = append(m.all, mounts...)
	}
	c.mounts = map[int32]bool{}
	if len(m.all) > maxMounts {
		c.differ("mounts", fmt.Sprint(len(m.all)), fmt.Sprintf("at most %d", maxMounts))
		return nil
	}
	for _, e := range m.all {
		m.register(e)
	}
	for _, e := range m.all {
		m.checkParent(e)
		m.checkMount(e)
	}
	m.checkSharing()
	m.checkPresent()
	m.checkCovered("masked path", c.e.Spec.Linux.MaskedPaths)
	m.checkCovered("read-only path", c.e.Spec.Linux.ReadonlyPaths)
	return nil
}

// mountCheck checks the mounts of a container.
type mountCheck struct {
	*check
	all    []*mnt.MntEntry
	byID   map[uint32]*mnt.MntEntry
	byPath map[string]*mnt.MntEntry // by mount point
}

// mountField names a mount in a difference.
func mountField(e *mnt.MntEntry) string { return "mount of " + e.GetMountpoint() }

// register records a mount by its ID and its mount point. Each has one mount: a second one would
// cover the first, such as a masked path.
func (m *mountCheck) register(e *mnt.MntEntry) {
	id, at := e.GetMntId(), e.GetMountpoint()
	if m.byID[id] != nil || int32(id) < 0 {
		m.differ(mountField(e)+": ID", fmt.Sprintf("%d twice or negative", id), "an ID of its own")
	}
	if m.byPath[at] != nil {
		m.differ(mountField(e), "two mounts", "one")
	}
	m.byID[id], m.byPath[at], m.mounts[int32(id)] = e, e, true
}

// checkParent checks that a mount is below the mount with the longest path above it, so that
// nothing of the tree is hidden or reached another way. The root has no parent.
func (m *mountCheck) checkParent(e *mnt.MntEntry) {
	at, parent := e.GetMountpoint(), m.byID[e.GetParentMntId()]
	if at == "/" {
		if parent != nil {
			m.differ(mountField(e)+": parent", "the mount of "+parent.GetMountpoint(), "none")
		}
		return
	}
	if want := m.above(at); parent == nil || parent != want {
		m.differ(mountField(e)+": parent", fmt.Sprintf("mount %d of %q", e.GetParentMntId(), parent.GetMountpoint()),
			"the mount of "+want.GetMountpoint())
	}
}

// above returns the mount that contains the mount point at; nil if there is none.
func (m *mountCheck) above(at string) *mnt.MntEntry {
	for path.IsAbs(at) && at != "/" {
		at = path.Dir(at)
		if e := m.byPath[at]; e != nil {
			return e
		}
	}
	return nil
}

// checkMount checks one mount by its kind.
func (m *mountCheck) checkMount(e *mnt.MntEntry) {
	at, field := e.GetMountpoint(), mountField(e)
	if !path.IsAbs(at) || path.Clean(at) != at {
		m.differ(field, "an unclean path", "a clean path")
	}
	if e.GetWithPlugin() || e.GetDeleted() {
		m.differ(field, "a deleted or foreign mount", "a mount of the spec")
	}
	spec, isMount := m.specMount(at)
	m.checkPropagation(field, e, spec)
	m.checkKnownFlags(field, e)
	switch m.kind(e) {
	case rootMount:
		m.checkRoot(field, e)
	case externalMount:
		m.checkExternalMount(field, e, spec, isMount)
	case maskMount:
		m.checkMasked(field, e)
	case readOnlyMount:
		m.checkReadOnlyPath(field, e)
	case filesystemMount:
		m.checkFilesystem(field, e, spec)
	default:
		m.differ(field, fstype(e)+" from "+e.GetSource(), "no mount")
	}
}

// mountKind is what a mount of the images must be, by its mount point.
type mountKind int

const (
	unknownMount mountKind = iota
	rootMount
	externalMount   // CRIU binds what the launcher passes
	maskMount       // covers a directory with an empty tmpfs
	readOnlyMount   // covers a directory with itself, read-only
	filesystemMount // CRIU mounts it anew
)

func (m *mountCheck) kind(e *mnt.MntEntry) mountKind {
	at := e.GetMountpoint()
	_, isMount := m.specMount(at)
	switch {
	case at == "/":
		return rootMount
	case e.ExtKey != nil || e.GetExtMount():
		return externalMount
	case slices.Contains(m.e.Spec.Linux.MaskedPaths, at):
		return maskMount
	case slices.Contains(m.e.Spec.Linux.ReadonlyPaths, at):
		return readOnlyMount
	case isMount:
		return filesystemMount
	}
	return unknownMount
}

// checkSharing checks that mounts have the same device only where they are the same filesystem.
// CRIU binds a mount from any other of the same device instead of mounting a filesystem: a tmpfs
// that claims to be a read-only volume would be that volume, and writable.
func (m *mountCheck) checkSharing() {
	first := map[uint32]*mnt.MntEntry{}
	for _, e := range m.all {
		other := first[e.GetRootDev()]
		if other == nil {
			first[e.GetRootDev()] = e
		} else if m.origin(e) != m.origin(other) {
			m.differ(mountField(e)+": device", "that of "+other.GetMountpoint(), "one of its own")
		}
	}
}

// origin names what the content of a mount comes from.
func (m *mountCheck) origin(e *mnt.MntEntry) string {
	switch m.kind(e) {
	case externalMount:
		if dev := m.byPath["/dev"]; e.GetExtKey() == nullDevice && dev != nil && dev.GetRootDev() == e.GetRootDev() {
			return m.origin(dev) // the launcher masks files with the container's /dev/null
		}
		return "the launcher"
	case maskMount:
		return "masks" // the launcher masks all directories with one tmpfs
	case readOnlyMount:
		return m.origin(m.above(e.GetMountpoint()))
	}
	return e.GetMountpoint()
}

// checkPresent checks that no mount of the spec is missing: its restrictions would not hold for the
// files at its mount point.
func (m *mountCheck) checkPresent() {
	if m.byPath["/"] == nil {
		m.differ("mount of /", "none", "one")
	}
	for _, spec := range m.e.Spec.Mounts {
		if at := path.Clean(spec.Destination); m.byPath[at] == nil {
			m.differ("mount of "+at, "none", "one")
		}
	}
}

// fstype returns the name of a mount's filesystem.
func fstype(e *mnt.MntEntry) string { return strings.ToLower(mnt.Fstype(e.GetFstype()).String()) }

// specMount returns the last mount of the spec at a path.
func (m *mountCheck) specMount(at string) (specs.Mount, bool) {
	mounts := m.e.Spec.Mounts
	for i := len(mounts) - 1; i >= 0; i-- {
		if path.Clean(mounts[i].Destination) == at {
			return mounts[i], true
		}
	}
	return specs.Mount{}, false
}

// checkCovered checks that all paths have a mount that covers them.
func (m *mountCheck) checkCovered(kind string, paths []string) {
	for _, p := range paths {
		covered := m.byPath[path.Clean(p)] != nil
		if !covered && !slices.Contains(m.e.AbsentPaths, p) {
			m.differ(kind+" "+p, "accessible", kind)
		}
	}
}
