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

// restrictions are the flags of a mount that restrict the container, with their names in a spec.
var restrictions = []struct {
	name string
	flag uint32
}{{"ro", unix.MS_RDONLY}, {"nosuid", unix.MS_NOSUID}, {"nodev", unix.MS_NODEV}, {"noexec", unix.MS_NOEXEC}}

// filesystems are the kinds of mounts that CRIU creates, by the type in a spec.
var filesystems = map[string]mnt.Fstype{"proc": mnt.Fstype_PROC, "sysfs": mnt.Fstype_SYSFS, "tmpfs": mnt.Fstype_TMPFS,
	"devpts": mnt.Fstype_DEVPTS, "mqueue": mnt.Fstype_MQUEUE, "cgroup2": mnt.Fstype_CGROUP2}

// checkMounts checks that every mount of the images is one that the launcher makes for the spec. A
// mount with a key is external: CRIU binds what the launcher passes for the key, so its source is
// that of the spec.
func (c *check) checkMounts() error {
	c.mounts = map[int32]bool{}
	var all []*mnt.MntEntry
	for id, name := range c.images.numbered("mountpoints") {
		mounts, err := entriesOf[mnt.MntEntry](c.images, name, "MNTS", nil)
		if err != nil {
			return err
		}
		if id != c.first.GetMntNsId() {
			c.differ("image "+name, "a second mount namespace", "one")
		}
		all = append(all, mounts...)
	}
	m := mountCheck{check: c, all: all, roots: 0}
	for _, e := range all {
		m.checkMount(e)
	}
	if m.roots != 1 {
		c.differ("mounts of /", fmt.Sprint(m.roots), "1")
	}
	m.checkCovered("masked path", c.e.Spec.Linux.MaskedPaths)
	m.checkCovered("read-only path", c.e.Spec.Linux.ReadonlyPaths)
	return nil
}

// mountCheck checks the mounts of a container.
type mountCheck struct {
	*check
	all   []*mnt.MntEntry
	roots int
}

// checkMount checks one mount and registers its ID.
func (m *mountCheck) checkMount(e *mnt.MntEntry) {
	at := e.GetMountpoint()
	field := "mount of " + at
	m.mounts[int32(e.GetMntId())] = true
	if !path.IsAbs(at) || path.Clean(at) != at {
		m.differ(field, "an unclean path", "a clean path")
	}
	if e.GetWithPlugin() || e.GetDeleted() {
		m.differ(field, "a deleted or foreign mount", "a mount of the spec")
	}
	spec, isMount := m.specMount(at)
	if e.GetSharedId() != 0 && !propagates(spec) {
		m.differ(field+": propagation", "shared", "private or slave")
	}
	switch {
	case at == "/":
		m.checkRoot(field, e)
	case e.ExtKey != nil || e.GetExtMount():
		m.checkExternalMount(field, e, spec, isMount)
	case slices.Contains(m.e.Spec.Linux.MaskedPaths, at):
		m.checkMasked(field, e)
	case slices.Contains(m.e.Spec.Linux.ReadonlyPaths, at):
		m.checkReadOnlyPath(field, e)
	case isMount:
		m.checkFilesystem(field, e, spec)
	default:
		m.differ(field, fstype(e)+" from "+e.GetSource(), "no mount")
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

func propagates(spec specs.Mount) bool {
	return slices.Contains(spec.Options, "shared") || slices.Contains(spec.Options, "rshared")
}

// checkRoot checks the root filesystem. CRIU mounts what the launcher passes as its root.
func (m *mountCheck) checkRoot(field string, e *mnt.MntEntry) {
	m.roots++
	if e.ExtKey != nil || e.GetExtMount() {
		m.differ(field, "an external mount", "the container's root filesystem")
	}
	if m.e.Spec.Root.Readonly && e.GetFlags()&unix.MS_RDONLY == 0 {
		m.differ(field, "writable", "read-only")
	}
}

// checkFlags checks that a mount has the restrictions of the spec.
func (m *mountCheck) checkFlags(field string, e *mnt.MntEntry, spec specs.Mount) {
	for _, r := range restrictions {
		wanted := slices.Contains(spec.Options, r.name) || slices.Contains(spec.Options, "r"+r.name)
		if wanted && (e.GetFlags()|e.GetSbFlags())&r.flag == 0 {
			m.differ(field, "no option "+r.name, r.name)
		}
	}
}

// checkExternalMount checks a mount that CRIU gets by a key: a bind mount, the cover of a masked
// file, a device, or a hierarchy of cgroups.
func (m *mountCheck) checkExternalMount(field string, e *mnt.MntEntry, spec specs.Mount, isMount bool) {
	at, key := e.GetMountpoint(), e.GetExtKey()
	device := slices.ContainsFunc(m.e.Spec.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Path == at })
	parent, inCgroups := m.specMount(path.Dir(at))
	switch {
	case key == "/dev/null" && slices.Contains(m.e.Spec.Linux.MaskedPaths, at):
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
	if mnt.Fstype(e.GetFstype()) != mnt.Fstype_TMPFS || (e.GetFlags()|e.GetSbFlags())&unix.MS_RDONLY == 0 {
		m.differ(field, fstype(e), "a read-only tmpfs")
	}
	m.checkOptions(field, e, nil)
}

// checkReadOnlyPath checks the read-only bind mount of a path of another mount.
func (m *mountCheck) checkReadOnlyPath(field string, e *mnt.MntEntry) {
	if e.GetFlags()&unix.MS_RDONLY == 0 {
		m.differ(field, "writable", "read-only")
	}
	parent := m.byID(e.GetParentMntId())
	below, ok := strings.CutPrefix(e.GetMountpoint(), parent.GetMountpoint())
	if !ok || parent.GetRootDev() != e.GetRootDev() || parent.GetFstype() != e.GetFstype() ||
		path.Join("/", parent.GetRoot(), below) != e.GetRoot() {
		m.differ(field, "another directory", "itself, read-only")
	}
}

// byID returns a mount; nil if there is none.
func (m *mountCheck) byID(id uint32) *mnt.MntEntry {
	for _, e := range m.all {
		if e.GetMntId() == id {
			return e
		}
	}
	return nil
}

// checkFilesystem checks a filesystem that CRIU mounts anew.
func (m *mountCheck) checkFilesystem(field string, e *mnt.MntEntry, spec specs.Mount) {
	want, known := filesystems[spec.Type]
	if spec.Type == "cgroup" { // version 1: a tmpfs with one directory per hierarchy
		want, known = mnt.Fstype_TMPFS, true
		spec.Options = slices.DeleteFunc(slices.Clone(spec.Options), func(o string) bool { return o == "ro" }) // of the hierarchies
		if mnt.Fstype(e.GetFstype()) == mnt.Fstype_CGROUP2 {
			want = mnt.Fstype_CGROUP2
		}
	}
	if !known || mnt.Fstype(e.GetFstype()) != want || e.GetRoot() != "/" && want != mnt.Fstype_CGROUP2 {
		m.differ(field, fstype(e)+" "+e.GetRoot(), spec.Type)
		return
	}
	if e.GetFsname() != "" {
		m.differ(field, "the filesystem "+e.GetFsname(), spec.Type)
	}
	m.checkFlags(field, e, spec)
	m.checkOptions(field, e, spec.Options)
}

// checkOptions checks the options that CRIU passes to the filesystem.
func (m *mountCheck) checkOptions(field string, e *mnt.MntEntry, spec []string) {
	if mnt.Fstype(e.GetFstype()) != mnt.Fstype_TMPFS {
		return
	}
	limit, limited := size(spec)
	have, hasLimit := size(strings.Split(e.GetOptions(), ","))
	if limited && (!hasLimit || have > limit) {
		m.differ(field+": size", e.GetOptions(), fmt.Sprintf("at most %d bytes", limit))
	}
	for _, o := range strings.Split(e.GetOptions(), ",") {
		name, _, _ := strings.Cut(o, "=")
		if !slices.Contains([]string{"", "size", "nr_inodes", "mode", "uid", "gid", "inode64", "inode32", "noswap", "huge"}, name) {
			m.differ(field, "the option "+o, "an option of tmpfs")
		}
	}
}

// size returns the size among the options of a tmpfs, in bytes.
func size(options []string) (bytes uint64, ok bool) {
	for _, o := range options {
		value, isSize := strings.CutPrefix(o, "size=")
		if !isSize {
			continue
		}
		var unit string
		if n, err := fmt.Sscanf(value, "%d%s", &bytes, &unit); err != nil && n < 1 {
			return 0, false
		}
		shift := map[string]uint{"": 0, "k": 10, "m": 20, "g": 30}
		s, known := shift[strings.ToLower(unit)]
		if !known || bytes > 1<<40 {
			return 0, false
		}
		return bytes << s, true
	}
	return 0, false
}

// checkCovered checks that all paths have a mount that covers them.
func (m *mountCheck) checkCovered(kind string, paths []string) {
	for _, p := range paths {
		covered := slices.ContainsFunc(m.all, func(e *mnt.MntEntry) bool { return e.GetMountpoint() == path.Clean(p) })
		if !covered && !slices.Contains(m.e.AbsentPaths, p) {
			m.differ(kind+" "+p, "accessible", kind)
		}
	}
}
