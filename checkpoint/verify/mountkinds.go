package verify

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// nullDevice is the key of the cover of masked files.
const nullDevice = "/dev/null"

// filesystems are the kinds of mounts that CRIU creates, by the type in a spec.
var filesystems = map[string]mnt.Fstype{
	"proc": mnt.Fstype_PROC, "sysfs": mnt.Fstype_SYSFS, "tmpfs": mnt.Fstype_TMPFS, "devpts": mnt.Fstype_DEVPTS,
	"mqueue": mnt.Fstype_MQUEUE, "cgroup2": mnt.Fstype_CGROUP2,
}

// checkRoot checks the root filesystem. CRIU mounts what the launcher passes as its root.
func (m *mountCheck) checkRoot(field string, e *mnt.MntEntry) {
	if e.ExtKey != nil || e.GetExtMount() {
		m.differ(field, "an external mount", "the container's root filesystem")
	}
	if m.e.Spec.Root.Readonly && e.GetFlags()&unix.MS_RDONLY == 0 {
		m.differ(field, "writable", "read-only")
	}
}

// checkExternalMount checks a mount that CRIU gets by a key: a bind mount, the cover of a masked
// file, a device, or a hierarchy of cgroups.
func (m *mountCheck) checkExternalMount(field string, e *mnt.MntEntry, spec specs.Mount, isMount bool) {
	at, key := e.GetMountpoint(), e.GetExtKey()
	device := slices.ContainsFunc(m.e.Spec.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Path == at })
	parent, inCgroups := m.specMount(path.Dir(at))
	switch {
	case e.GetExtMount(): // of an old CRIU: the key is in another field
		m.differ(field, "an external mount without key", "a mount of the spec")
	case key == nullDevice && path.Base(e.GetRoot()) == "null" && slices.Contains(m.e.Spec.Linux.MaskedPaths, at):
	case key == at && isMount && isBind(spec):
		m.checkFlags(field, e, spec)
	case key == at && device:
	case key == at && inCgroups && parent.Type == "cgroup" && mnt.Fstype(e.GetFstype()) == mnt.Fstype_CGROUP:
		m.checkFlags(field, e, parent)
	default:
		m.differ(field, fmt.Sprintf("an external mount with key %s", key), "a mount of the spec")
	}
}

func isBind(spec specs.Mount) bool {
	return spec.Type == "bind" || slices.Contains(spec.Options, "bind") || slices.Contains(spec.Options, "rbind")
}

// checkMasked checks the cover of a masked directory: an empty read-only tmpfs.
func (m *mountCheck) checkMasked(field string, e *mnt.MntEntry) {
	if mnt.Fstype(e.GetFstype()) != mnt.Fstype_TMPFS || e.GetFlags()&unix.MS_RDONLY == 0 {
		m.differ(field, fstype(e), "a read-only tmpfs")
	}
	m.checkNew(field, e, specs.Mount{Type: "tmpfs", Source: "tmpfs", Options: []string{"ro"}})
	m.checkOptions(field, e, specs.Mount{})
}

// checkReadOnlyPath checks the read-only bind mount of a path of another mount. CRIU binds it from
// that mount.
func (m *mountCheck) checkReadOnlyPath(field string, e *mnt.MntEntry) {
	if e.GetFlags()&unix.MS_RDONLY == 0 {
		m.differ(field, "writable", "read-only")
	}
	parent := m.above(e.GetMountpoint())
	below := strings.TrimPrefix(e.GetMountpoint(), parent.GetMountpoint())
	if m.kind(parent) == externalMount || parent.GetRootDev() != e.GetRootDev() ||
		parent.GetFstype() != e.GetFstype() || path.Join("/", parent.GetRoot(), below) != e.GetRoot() {
		m.differ(field, "another directory", "itself, read-only")
	}
	if e.GetMasterId() != 0 && e.GetMasterId() != parent.GetMasterId() {
		m.differ(field+": propagation", "from another mount", "as that of "+parent.GetMountpoint())
	}
	spec, _ := m.specMount(parent.GetMountpoint())
	m.checkFlags(field, e, spec)
}

// checkFilesystem checks a filesystem that CRIU mounts anew.
func (m *mountCheck) checkFilesystem(field string, e *mnt.MntEntry, spec specs.Mount) {
	want, known := filesystems[spec.Type]
	if spec.Type == "cgroup" { // version 1: a tmpfs with one directory per hierarchy
		want, known = mnt.Fstype_TMPFS, true
		// Of version 1, only the hierarchies are read-only.
		if mnt.Fstype(e.GetFstype()) == mnt.Fstype_CGROUP2 {
			want = mnt.Fstype_CGROUP2
		} else {
			spec.Options = slices.DeleteFunc(slices.Clone(spec.Options), func(o string) bool { return o == "ro" })
		}
	}
	if !known || mnt.Fstype(e.GetFstype()) != want {
		m.differ(field, fstype(e)+" "+e.GetRoot(), spec.Type)
		return
	}
	m.checkNew(field, e, spec)
	m.checkFlags(field, e, spec)
	m.checkOptions(field, e, spec)
}

// checkNew checks what CRIU passes to mount(2) for a new filesystem. It must have no device and no
// source that is a path, and be the whole filesystem.
func (m *mountCheck) checkNew(field string, e *mnt.MntEntry, spec specs.Mount) {
	const minorBits = 20
	if e.GetRootDev()>>minorBits != 0 {
		m.differ(field+": device", fmt.Sprintf("%#x", e.GetRootDev()), "none")
	}
	if e.GetFsname() != "" {
		m.differ(field, "the filesystem "+e.GetFsname(), spec.Type)
	}
	if e.GetRoot() != "/" {
		m.differ(field, fstype(e)+" "+e.GetRoot(), spec.Type)
	}
	if s := e.GetSource(); s != spec.Source && s != fstype(e) && s != spec.Type {
		m.differ(field+": source", s, quoted(spec.Source))
	}
	if e.GetMasterId() != 0 {
		m.differ(field+": propagation", "from another mount", "private")
	}
	m.checkSuperFlags(field, e, spec)
}
