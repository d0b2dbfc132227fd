package verify

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
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

// mountFlags are the flags of a mount that give the container nothing: restrictions, times and
// propagation without MS_SHARED. CRIU passes all flags to mount(2), where others such as MS_BIND do
// something else.
const mountFlags = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOSYMFOLLOW |
	unix.MS_NOATIME | unix.MS_NODIRATIME | unix.MS_RELATIME | unix.MS_STRICTATIME |
	unix.MS_PRIVATE | unix.MS_SLAVE | unix.MS_UNBINDABLE

// superFlags are the flags of filesystems. CRIU does not use those of a bind mount.
const superFlags = unix.MS_RDONLY | unix.MS_SYNCHRONOUS | unix.MS_DIRSYNC | unix.MS_MANDLOCK | unix.MS_LAZYTIME

// checkKnownFlags checks that a mount has no other flags than those of mounts and filesystems.
func (m *mountCheck) checkKnownFlags(field string, e *mnt.MntEntry) {
	if other := e.GetFlags() &^ (mountFlags | unix.MS_SHARED); other != 0 {
		m.differ(field+": flags", fmt.Sprintf("%#x", other), "flags of a mount")
	}
	if other := e.GetSbFlags() &^ superFlags; other != 0 || e.SbFlags == nil {
		m.differ(field+": flags of the filesystem", fmt.Sprintf("%#x", other), "flags of a filesystem")
	}
}

// checkPropagation checks that a mount is shared only if that of the spec is.
func (m *mountCheck) checkPropagation(field string, e *mnt.MntEntry, spec specs.Mount) {
	shared := e.GetSharedId() != 0 || e.GetFlags()&unix.MS_SHARED != 0
	if shared && !slices.Contains(spec.Options, "shared") && !slices.Contains(spec.Options, "rshared") {
		m.differ(field+": propagation", "shared", "private or slave")
	}
}

// checkFlags checks that a mount has the restrictions of the spec. Those of the filesystem do not
// count: CRIU's last call for a mount sets only its own flags.
func (m *mountCheck) checkFlags(field string, e *mnt.MntEntry, spec specs.Mount) {
	for _, r := range restrictions {
		wanted := slices.Contains(spec.Options, r.name) || slices.Contains(spec.Options, "r"+r.name)
		if wanted && e.GetFlags()&r.flag == 0 {
			m.differ(field, "no option "+r.name, r.name)
		}
	}
}

// checkSuperFlags checks the flags of a new filesystem. Only one that the spec makes read-only may
// be: the kernel would change a filesystem that the node has mounted, too.
func (m *mountCheck) checkSuperFlags(field string, e *mnt.MntEntry, spec specs.Mount) {
	permitted := uint32(0)
	if slices.Contains(spec.Options, "ro") && mnt.Fstype(e.GetFstype()) != mnt.Fstype_CGROUP2 {
		permitted = unix.MS_RDONLY
	}
	if other := e.GetSbFlags() &^ permitted; other != 0 {
		m.differ(field+": flags of the filesystem", fmt.Sprintf("%#x", other), fmt.Sprintf("%#x", permitted))
	}
}

// tmpfsOptions are options of a tmpfs that are limited elsewhere or give nothing.
var tmpfsOptions = []string{"size", "nr_inodes", "mode", "uid", "gid", "inode64", "inode32", "noswap", "huge"}

// checkOptions checks the options that CRIU passes to a new filesystem.
func (m *mountCheck) checkOptions(field string, e *mnt.MntEntry, spec specs.Mount) {
	have := m.options(e)
	switch mnt.Fstype(e.GetFstype()) {
	case mnt.Fstype_TMPFS:
		m.checkTmpfsOptions(field, have, spec.Options)
	case mnt.Fstype_CGROUP2: // the kernel may set them for the node, too
		if !sameOptions(have, m.e.CgroupOptions) {
			m.differ(field+": options", quoted(strings.Join(have, ",")), quoted(strings.Join(m.e.CgroupOptions, ",")))
		}
	default:
		m.checkSameOptions(field, have, spec.Options)
	}
}

// options returns the options of a mount without SELinux's context, which CRIU replaces if the spec
// has one.
func (m *mountCheck) options(e *mnt.MntEntry) (all []string) {
	text := e.GetOptions()
	if m.e.Spec.Linux.MountLabel != "" {
		text = context.ReplaceAllString(text, "")
	}
	for o := range strings.SplitSeq(text, ",") {
		if o != "" {
			all = append(all, o)
		}
	}
	return all
}

var context = regexp.MustCompile(`(^|,)context="[^"]*"`)

// sameOptions compares lists of options regardless of their order.
func sameOptions(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

func (m *mountCheck) checkTmpfsOptions(field string, have, spec []string) {
	limit, limited := size(spec)
	bytes, hasLimit := size(have)
	if limited && (!hasLimit || bytes > limit) {
		m.differ(field+": size", strings.Join(have, ","), fmt.Sprintf("at most %d bytes", limit))
	}
	for i, o := range have {
		name, _, _ := strings.Cut(o, "=")
		if slices.ContainsFunc(have[:i], func(p string) bool { return strings.HasPrefix(p, name+"=") }) {
			m.differ(field, "the option "+name+" twice", "once") // the kernel takes the last
		}
		if !slices.Contains(tmpfsOptions, name) {
			m.differ(field, "the option "+o, "an option of tmpfs")
		}
	}
}

// restrictingOptions are those that the images must not lack. Each filesystem of a container is its
// own (newinstance).
var restrictingOptions = []string{"hidepid", "subset", "gid", "mode", "ptmxmode", "newinstance"}

// checkSameOptions checks that a filesystem has only options of the spec, and all that restrict it.
func (m *mountCheck) checkSameOptions(field string, have, spec []string) {
	want := map[string]bool{}
	for _, o := range spec {
		want[normal(o)] = true
	}
	for _, o := range have {
		if !want[normal(o)] {
			m.differ(field, "the option "+o, "an option of the spec")
		}
		delete(want, normal(o))
	}
	for _, o := range spec {
		if name, _, _ := strings.Cut(o, "="); want[normal(o)] && slices.Contains(restrictingOptions, name) {
			m.differ(field, "no option "+o, o)
		}
	}
}

// normal returns an option with its number without leading zeros: the kernel shows mode=620 for
// mode=0620.
func normal(option string) string {
	name, value, found := strings.Cut(option, "=")
	if n, err := strconv.ParseUint(value, 10, 32); found && err == nil {
		return fmt.Sprintf("%s=%d", name, n)
	}
	return option
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
