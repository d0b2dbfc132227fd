package verify_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify"
	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
)

const mountsImage = "mountpoints-13.img"

// mount changes the mount at a path.
func mount(t testing.TB, dir, at string, do func(*mnt.MntEntry)) {
	t.Helper()
	change(t, dir, mountsImage, func(e *mnt.MntEntry) bool {
		if e.GetMountpoint() != at {
			return false
		}
		do(e)
		return true
	})
}

// addMount adds a copy of the mount at a path, changed by do, as the first or last of the image.
func addMount(t testing.TB, dir, at string, first bool, do func(*mnt.MntEntry)) {
	t.Helper()
	path := filepath.Join(dir, mountsImage)
	in, err := os.Open(path)
	testutil.Must(t, err)
	image, err := crit.New(in, nil, "", false, false).Decode(new(mnt.MntEntry))
	testutil.Must(t, err)
	testutil.Must(t, in.Close())
	for _, e := range image.Entries {
		m := e.Message.(*mnt.MntEntry)
		if m.GetMountpoint() != at {
			continue
		}
		added := proto.Clone(m).(*mnt.MntEntry)
		added.MntId = proto.Uint32(500)
		do(added)
		entries := []*crit.CriuEntry{{Message: added}}
		if image.Entries = append(entries, image.Entries...); !first {
			image.Entries = append(image.Entries[1:], entries...)
		}
		out, err := os.Create(path)
		testutil.Must(t, err)
		testutil.Must(t, crit.New(nil, out, "", false, false).Encode(image))
		testutil.Must(t, out.Close())
		return
	}
	t.Fatalf("no mount of %s", at)
}

// setMount returns a change of the mount at a path.
func setMount(at string, do func(*mnt.MntEntry)) func(testing.TB, string) {
	return func(t testing.TB, dir string) { mount(t, dir, at, do) }
}

// hostileMounts are changes of mounts.
var hostileMounts = []mutation{
	{"mounted disk", "mount of /dev/shm: the checkpoint has auto", func(t testing.TB, dir string) {
		mount(t, dir, "/dev/shm", func(e *mnt.MntEntry) {
			e.Fstype, e.Fsname, e.Source = proto.Uint32(16), proto.String("ext4"), proto.String("/dev/sda1")
		})
	}},
	{"additional mount", "mount of /host: the checkpoint has tmpfs", func(t testing.TB, dir string) {
		mount(t, dir, "/dev/shm", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("/host") })
	}},
	{"bind of the node's root", "external mount with key /", func(t testing.TB, dir string) {
		mount(t, dir, "/etc/hosts", func(e *mnt.MntEntry) { e.ExtKey = proto.String("/") })
	}},
	{"writable read-only path", "mount of /proc/sys: the checkpoint has writable", func(t testing.TB, dir string) {
		mount(t, dir, "/proc/sys", func(e *mnt.MntEntry) { e.Flags = proto.Uint32(0) })
	}},
	{"accessible masked path", "masked path /proc/keys: the checkpoint has accessible", func(t testing.TB, dir string) {
		mount(t, dir, "/proc/keys", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("/proc/timer_list") })
	}},
	{"set-id files on a mount", "mount of /dev/shm: the checkpoint has no option nosuid", func(t testing.TB, dir string) {
		mount(t, dir, "/dev/shm", func(e *mnt.MntEntry) { e.Flags = proto.Uint32(0) })
	}},
	{"large tmpfs", "mount of /dev/shm: size", func(t testing.TB, dir string) {
		mount(t, dir, "/dev/shm", func(e *mnt.MntEntry) { e.Options = proto.String("size=99999999k") })
	}},
	{"shared mount", "mount of /dev/shm: propagation", func(t testing.TB, dir string) {
		mount(t, dir, "/dev/shm", func(e *mnt.MntEntry) { e.SharedId = proto.Uint32(1) })
	}},
	{"second proc over the masked one", "mount of /proc: the checkpoint has two mounts", func(t testing.TB, dir string) {
		addMount(t, dir, "/proc", false, func(e *mnt.MntEntry) { e.ParentMntId = proto.Uint32(106) })
	}},
	{"second proc below the masked one", "mount of /proc: the checkpoint has two mounts", func(t testing.TB, dir string) {
		addMount(t, dir, "/proc", true, func(e *mnt.MntEntry) { e.RootDev = proto.Uint32(60) })
	}},
	{"second mount with the same ID", "mount of /proc: ID", func(t testing.TB, dir string) {
		addMount(t, dir, "/proc", true, func(e *mnt.MntEntry) { e.MntId = proto.Uint32(106) })
	}},
	{"second root", "mount of /: the checkpoint has two mounts", func(t testing.TB, dir string) {
		addMount(t, dir, "/", false, func(*mnt.MntEntry) {})
	}},
	{"no root", "mount of /: the checkpoint has none", setMount("/", func(e *mnt.MntEntry) {
		e.Mountpoint = proto.String("/dev/pts")
	})},
	{"root below another mount", "mount of /: parent", setMount("/", func(e *mnt.MntEntry) { e.ParentMntId = proto.Uint32(106) })},
	{"mask below another mount", "mount of /proc/acpi: parent", setMount("/proc/acpi", func(e *mnt.MntEntry) {
		e.ParentMntId = proto.Uint32(104)
	})},
	{"mount below itself", "mount of /proc: parent", setMount("/proc", func(e *mnt.MntEntry) { e.ParentMntId = proto.Uint32(106) })},
	{"mount without parent", "mount of /proc: parent", setMount("/proc", func(e *mnt.MntEntry) { e.ParentMntId = proto.Uint32(9999) })},
	{"missing mount", "mount of /dev/mqueue: the checkpoint has none", setMount("/dev/mqueue", func(e *mnt.MntEntry) {
		e.Mountpoint = proto.String("/dev/other")
	})},
	{"bind of a host path", "mount of /dev/shm: flags: the checkpoint has 0x1000", setMount("/dev/shm", func(e *mnt.MntEntry) {
		e.Source, e.Flags = proto.String("/"), proto.Uint32(e.GetFlags()|unix.MS_BIND)
	})},
	{"bind hidden in the filesystem's flags", "flags of the filesystem: the checkpoint has 0x1000",
		setMount("/dev/shm", func(e *mnt.MntEntry) {
			e.Source, e.SbFlags = proto.String("/"), proto.Uint32(unix.MS_BIND)
		})},
	{"recursive bind of a volume", "mount of /etc/hosts: flags: the checkpoint has 0x4000", setMount("/etc/hosts", func(e *mnt.MntEntry) {
		e.Flags = proto.Uint32(e.GetFlags() | unix.MS_REC)
	})},
	{"remount", "mount of /proc: flags", setMount("/proc", func(e *mnt.MntEntry) { e.Flags = proto.Uint32(unix.MS_REMOUNT) })},
	{"shared by its flags", "mount of /proc: propagation", setMount("/proc", func(e *mnt.MntEntry) { e.Flags = proto.Uint32(unix.MS_SHARED) })},
	{"flags of an old CRIU", "flags of the filesystem", setMount("/proc", func(e *mnt.MntEntry) { e.SbFlags = nil })},
	{"restriction only of the filesystem", "mount of /dev/shm: the checkpoint has no option noexec",
		setMount("/dev/shm", func(e *mnt.MntEntry) {
			e.SbFlags, e.Flags = proto.Uint32(unix.MS_NOEXEC), proto.Uint32(e.GetFlags()&^unix.MS_NOEXEC)
		})},
	{"node's filesystem made read-only", "mount of /proc: flags of the filesystem: the checkpoint has 0x1",
		setMount("/proc", func(e *mnt.MntEntry) { e.SbFlags = proto.Uint32(unix.MS_RDONLY) })},
	{"source that is a path", "mount of /dev/shm: source: the checkpoint has /etc", setMount("/dev/shm", func(e *mnt.MntEntry) {
		e.Source = proto.String("/etc")
	})},
	{"device", "mount of /dev/shm: device: the checkpoint has 0x800001", setMount("/dev/shm", func(e *mnt.MntEntry) {
		e.RootDev = proto.Uint32(8<<20 | 1)
	})},
	{"tmpfs that is a volume", "device: the checkpoint has that of", setMount("/etc/hosts", func(e *mnt.MntEntry) {
		e.RootDev = proto.Uint32(56) // that of /dev/shm
	})},
	{"tmpfs that is the masks", "device: the checkpoint has that of", setMount("/dev/shm", func(e *mnt.MntEntry) {
		e.RootDev = proto.Uint32(59)
	})},
	{"another filesystem", "mount of /dev/mqueue: the checkpoint has proc", setMount("/dev/mqueue", func(e *mnt.MntEntry) {
		e.Fstype, e.Source = proto.Uint32(uint32(mnt.Fstype_PROC)), proto.String("proc")
	})},
	{"name of a filesystem", "the filesystem ext4", setMount("/dev/shm", func(e *mnt.MntEntry) { e.Fsname = proto.String("ext4") })},
	{"part of a filesystem", "mount of /sys: the checkpoint has sysfs /kernel", setMount("/sys", func(e *mnt.MntEntry) {
		e.Root = proto.String("/kernel")
	})},
	{"part of a masking tmpfs", "mount of /proc/acpi: the checkpoint has tmpfs /x", setMount("/proc/acpi", func(e *mnt.MntEntry) {
		e.Root = proto.String("/x")
	})},
	{"writable mask", "mount of /proc/acpi: the checkpoint has tmpfs", setMount("/proc/acpi", func(e *mnt.MntEntry) {
		e.Flags = proto.Uint32(0)
	})},
	{"mask by another device", "an external mount with key /dev/null", setMount("/proc/keys", func(e *mnt.MntEntry) {
		e.Root = proto.String("/zero")
	})},
	{"read-only path that is another", "mount of /proc/bus: the checkpoint has another directory", setMount("/proc/bus", func(e *mnt.MntEntry) {
		e.Root = proto.String("/irq")
	})},
	{"slave of another mount", "mount of /dev/shm: propagation", setMount("/dev/shm", func(e *mnt.MntEntry) { e.MasterId = proto.Uint32(15) })},
	{"option of proc", "mount of /proc: the checkpoint has the option gid=0", setMount("/proc", func(e *mnt.MntEntry) {
		e.Options = proto.String("gid=0")
	})},
	{"option of tmpfs", "the option mpol=bind:0", setMount("/dev/shm", func(e *mnt.MntEntry) {
		e.Options = proto.String("size=65536k,mpol=bind:0")
	})},
	{"size of a tmpfs twice", "the option size twice", setMount("/dev/shm", func(e *mnt.MntEntry) {
		e.Options = proto.String("size=1k,size=9g")
	})},
	{"mode of pseudoterminals", "mount of /dev/pts: the checkpoint has the option mode=666", setMount("/dev/pts", func(e *mnt.MntEntry) {
		e.Options = proto.String("gid=5,mode=666,ptmxmode=666,newinstance")
	})},
	{"node's pseudoterminals", "mount of /dev/pts: the checkpoint has no option newinstance", setMount("/dev/pts", func(e *mnt.MntEntry) {
		e.Options = proto.String("gid=5,mode=620,ptmxmode=666")
	})},
	{"autodetected mount", "an external mount with key CRIU:AUTOGENERATED", setMount("/etc/hosts", func(e *mnt.MntEntry) {
		e.ExtKey = proto.String("CRIU:AUTOGENERATED")
	})},
	{"external mount of an old CRIU", "an external mount without key", setMount("/etc/hosts", func(e *mnt.MntEntry) {
		e.ExtKey, e.ExtMount = nil, proto.Bool(true)
	})},
	{"external mount twice", "an external mount without key", setMount("/etc/hosts", func(e *mnt.MntEntry) { e.ExtMount = proto.Bool(true) })},
	{"mount of a plugin", "a deleted or foreign mount", setMount("/proc", func(e *mnt.MntEntry) { e.WithPlugin = proto.Bool(true) })},
	{"deleted mount", "a deleted or foreign mount", setMount("/etc/hosts", func(e *mnt.MntEntry) { e.Deleted = proto.Bool(true) })},
	{"mount point outside", "an unclean path", setMount("/dev/shm", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("/dev/../../shm") })},
	{"relative mount point", "an unclean path", setMount("/dev/shm", func(e *mnt.MntEntry) { e.Mountpoint = proto.String("dev/shm") })},
}

// TestManyMounts checks that the number of mounts is limited.
func TestManyMounts(t *testing.T) {
	t.Parallel()
	dir := verifytest.Images(t, verifytest.Versions[0])
	data, err := os.ReadFile(filepath.Join(dir, mountsImage))
	testutil.Must(t, err)
	const copies = 200
	testutil.Must(t, os.WriteFile(filepath.Join(dir, mountsImage),
		append(data[:8:8], strings.Repeat(string(data[8:]), copies)...), 0o600))
	r, err := verify.Container(verifytest.Open(t, dir), verifytest.Expected(t))
	testutil.Must(t, err)
	if len(r.Differences) == 0 || r.Differences[0].String() != "mounts: the checkpoint has 5200, permitted is at most 4096" {
		t.Errorf("%q", r.Differences)
	}
}

// TestCgroup2 checks the mount of the cgroup filesystem of version 2. Its options must be the
// node's.
func TestCgroup2(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ options, difference string }{
		{"memory_recursiveprot,nsdelegate", ""},
		{"nsdelegate", "mount of /sys/cgroup2: options"},
		{"", "mount of /sys/cgroup2: options"},
	} {
		t.Run(tc.options, func(t *testing.T) {
			t.Parallel()
			dir := verifytest.Images(t, verifytest.Versions[0])
			mount(t, dir, "/dev/mqueue", func(e *mnt.MntEntry) {
				e.Mountpoint, e.Fstype = proto.String("/sys/cgroup2"), proto.Uint32(uint32(mnt.Fstype_CGROUP2))
				e.ParentMntId, e.Source, e.Options = proto.Uint32(111), proto.String("cgroup"), proto.String(tc.options)
				e.Flags = proto.Uint32(unix.MS_RDONLY)
			})
			expected := verifytest.Expected(t)
			expected.CgroupOptions = []string{"nsdelegate", "memory_recursiveprot"}
			for i := range expected.Spec.Mounts {
				if m := &expected.Spec.Mounts[i]; m.Destination == "/dev/mqueue" {
					*m = specs.Mount{Destination: "/sys/cgroup2", Type: "cgroup", Source: "cgroup", Options: []string{"ro"}}
				}
			}
			r, err := verify.Container(verifytest.Open(t, dir), expected)
			testutil.Must(t, err)
			fields := ""
			for _, d := range r.Differences {
				fields += d.Field
			}
			if fields != tc.difference {
				t.Errorf("%q", r.Differences)
			}
		})
	}
}
