package verify_test

import (
	"archive/tar"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	sk_opts "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-opts"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/timer"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/tty"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify"
	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
)

// setCore returns a change of the image of a thread.
func setCore(tid int, do func(*criu_core.CoreEntry)) func(testing.TB, string) {
	return func(t testing.TB, dir string) { core(t, dir, tid, do) }
}

// addTimer adds a POSIX timer.
func addTimer(e *criu_core.CoreEntry, clock uint32) {
	n, wide := proto.Uint32(0), proto.Uint64(0)
	e.Tc.Timers.Posix = append(e.Tc.Timers.Posix, &timer.PosixTimerEntry{ItId: n, ClockId: &clock, SiSigno: n,
		ItSigevNotify: n, SivalPtr: wide, Overrun: n, Isec: wide, Insec: wide, Vsec: wide, Vnsec: wide})
}

// setFile returns a change of the first open file that has what do changes.
func setFile(do func(*fdinfo.FileEntry) bool) func(testing.TB, string) {
	return func(t testing.TB, dir string) { openFile(t, dir, do) }
}

// setNamed returns a change of the unix socket with a name.
func setNamed(do func(*fdinfo.FileEntry)) func(testing.TB, string) {
	return setFile(func(e *fdinfo.FileEntry) bool {
		if len(e.GetUsk().GetName()) == 0 {
			return false
		}
		do(e)
		return true
	})
}

// setInventory returns a change of the inventory.
func setInventory(do func(*inventory.InventoryEntry)) func(testing.TB, string) {
	return func(t testing.TB, dir string) {
		change(t, dir, "inventory.img", func(e *inventory.InventoryEntry) bool { do(e); return true })
	}
}

// setProcess returns a change of the process pid in the tree.
func setProcess(pid uint32, do func(*pstree.PstreeEntry)) func(testing.TB, string) {
	return func(t testing.TB, dir string) {
		change(t, dir, "pstree.img", func(e *pstree.PstreeEntry) bool {
			if e.GetPid() == pid {
				do(e)
			}
			return e.GetPid() == pid
		})
	}
}

// addEntry appends an entry to an image.
func addEntry(t testing.TB, dir, name string, m proto.Message) {
	t.Helper()
	path := filepath.Join(dir, name)
	data, err := os.ReadFile(path)
	testutil.Must(t, err)
	entry, err := proto.MarshalOptions{AllowPartial: true}.Marshal(m)
	testutil.Must(t, err)
	data = append(binary.LittleEndian.AppendUint32(data, uint32(len(entry))), entry...)
	testutil.Must(t, os.WriteFile(path, data, 0o600))
}

// hostileProcesses are further changes of processes, files and the inventory.
var hostileProcesses = []mutation{
	{"no cgroups", "cgroups: the checkpoint has none", func(t testing.TB, dir string) {
		testutil.Must(t, os.Remove(filepath.Join(dir, "cgroup.img")))
	}},
	{"SELinux label of sockets", "process 1: SELinux label of sockets", setCore(1, func(e *criu_core.CoreEntry) {
		e.ThreadCore.Creds.LsmSockcreate = proto.String("x")
	})},
	{"AppArmor policy", "process 1: AppArmor policy", setCore(1, func(e *criu_core.CoreEntry) {
		e.ThreadCore.Creds.ApparmorData = []byte("x")
	})},
	{"file twice", "file 3: the checkpoint has two entries", setFile(func(e *fdinfo.FileEntry) bool {
		if e.GetId() == 2 {
			e.Id = proto.Uint32(3)
		}
		return e.GetId() == 3
	})},
	{"file without content", "reg without its entry", setFile(func(e *fdinfo.FileEntry) bool {
		had := e.Reg != nil
		e.Reg = nil
		return had
	})},
	{"socket as a file with a path", "mode 140000", setFile(func(e *fdinfo.FileEntry) bool {
		if e.Reg != nil {
			e.Reg.Mode = proto.Uint32(unix.S_IFSOCK)
		}
		return e.Reg != nil
	})},
	{"clock that wakes the machine", "clock: the checkpoint has 8", setFile(func(e *fdinfo.FileEntry) bool {
		if e.Tfd != nil {
			e.Tfd.Clockid = proto.Uint32(unix.CLOCK_REALTIME_ALARM)
		}
		return e.Tfd != nil
	})},
	{"console of the node", "terminal 1: the checkpoint has console", func(t testing.TB, dir string) {
		write(t, dir, "tty-info.img", "\x19CVT"+string(binary.LittleEndian.AppendUint32(nil, ttyInfoMagic)))
		addEntry(t, dir, "tty-info.img", terminal(1, tty.TtyType_CONSOLE))
	}},
	{"format of the images", "format of the images: the checkpoint has 3", setInventory(func(e *inventory.InventoryEntry) {
		e.ImgVersion = proto.Uint32(3)
	})},
	{"incremental images", "incremental images", setInventory(func(e *inventory.InventoryEntry) { e.PreDumpMode = proto.Uint32(1) })},
	{"images of an old CRIU", "that of an old CRIU", setInventory(func(e *inventory.InventoryEntry) { e.NsPerId = nil })},
	{"user namespace", "user namespace: the checkpoint has one of its own, permitted is the node's", func(t testing.TB, dir string) {
		change(t, dir, "ids-1.img", func(e *criu_core.TaskKobjIdsEntry) bool { e.UserNsId = proto.Uint32(77); return true })
	}},
	{"time namespace", "process 7: time namespace", func(t testing.TB, dir string) {
		change(t, dir, "ids-7.img", func(e *criu_core.TaskKobjIdsEntry) bool { e.TimeNsId = proto.Uint32(77); return true })
	}},
	{"name of a memfd", "memfd: name", func(t testing.TB, dir string) {
		change(t, dir, "memfd.img", func(e *memfd.MemfdInodeEntry) bool { e.Name = proto.String(strings.Repeat("x", 300)); return true })
	}},
	{"pages of another process", "the checkpoint has pages of another process", func(t testing.TB, dir string) {
		change(t, dir, "pagemap-7.img", func(e *pagemap.PagemapHead) bool { e.PagesId = proto.Uint32(1); return true })
	}},
	{"external root", "mount of /: the checkpoint has an external mount", setMount("/", func(e *mnt.MntEntry) { e.ExtKey = proto.String("/") })},
	{"read-only path that follows another mount", "mount of /proc/sys: propagation", setMount("/proc/sys", func(e *mnt.MntEntry) {
		e.MasterId = proto.Uint32(15)
	})},
	{"image of a second mount namespace", "image mountpoints-99.img: the checkpoint has a second mount namespace", func(t testing.TB, dir string) {
		data, err := os.ReadFile(filepath.Join(dir, mountsImage))
		testutil.Must(t, err)
		write(t, dir, "mountpoints-99.img", string(data))
	}},
	{"parent of init", "process 1: parent: the checkpoint has 5", setProcess(1, func(e *pstree.PstreeEntry) { e.Ppid = proto.Uint32(5) })},
	{"thread twice", "process 7: thread: the checkpoint has 6 twice", setProcess(7, func(e *pstree.PstreeEntry) { e.Threads = append(e.Threads, 6) })},
	{"architecture", "process 1: architecture", setCore(1, func(e *criu_core.CoreEntry) { e.Mtype = criu_core.CoreEntry_AARCH64.Enum() })},
	{"state of a process", "process 1: state", setCore(1, func(e *criu_core.CoreEntry) { e.Tc.TaskState = proto.Uint32(9) })},
	{"fewer resource limits", "process 1: resource limits: the checkpoint has 15, permitted is 16", setCore(1, func(e *criu_core.CoreEntry) {
		e.Tc.Rlimits.Rlimits = e.Tc.Rlimits.Rlimits[:15]
	})},
	{"no resource limits", "process 7: resource limits: the checkpoint has 0, permitted is 16", setCore(7, func(e *criu_core.CoreEntry) {
		e.Tc.Rlimits = nil
	})},
	{"timer that wakes the machine", "process 1: timer: clock: the checkpoint has 9", setCore(1, func(e *criu_core.CoreEntry) {
		addTimer(e, unix.CLOCK_BOOTTIME_ALARM)
	})},
	{"unknown resource limit", "process 1: resource limits: the checkpoint has 17", setCore(1, func(e *criu_core.CoreEntry) {
		for len(e.Tc.Rlimits.Rlimits) < 17 {
			e.Tc.Rlimits.Rlimits = append(e.Tc.Rlimits.Rlimits, e.Tc.Rlimits.Rlimits[7])
		}
	})},
	{"thread without credentials", "process 7: the checkpoint has no credentials", setCore(7, func(e *criu_core.CoreEntry) { e.ThreadCore = nil })},
	{"nice", "process 1: nice", setCore(1, func(e *criu_core.CoreEntry) { e.ThreadCore.SchedNice = proto.Int32(-5) })},
	{"SELinux label of a descriptor", "descriptor 0: SELinux label", func(t testing.TB, dir string) {
		change(t, dir, "fdinfo-2.img", func(e *fdinfo.FdinfoEntry) bool {
			e.XattrSecuritySelinux = proto.String("x")
			return e.GetFd() == 0
		})
	}},
	{"flags of a seccomp filter", "seccomp filter: flags", func(t testing.TB, dir string) {
		change(t, dir, "seccomp.img", func(e *seccomp.SeccompEntry) bool { e.SeccompFilters[0].Flags = proto.Uint32(4); return true })
	}},
	{"flags of a unix socket", "flags of a unix socket", setNamed(func(e *fdinfo.FileEntry) { e.Usk.Uflags = proto.Uint32(1) })},
	{"directory of a unix socket", "relative name of a unix socket", setNamed(func(e *fdinfo.FileEntry) { e.Usk.NameDir = proto.String("/etc") })},
	{"long name of a unix socket", "name of a unix socket: the checkpoint has 300 bytes", setNamed(func(e *fdinfo.FileEntry) {
		e.Usk.Name = make([]byte, 300)
	})},
	{"unix socket outside", "name of a unix socket: the checkpoint has /../run/x", setNamed(func(e *fdinfo.FileEntry) {
		e.Usk.Name = []byte("/../run/x\x00")
	})},
	{"family of a socket", "family of a socket: the checkpoint has 40", setFile(func(e *fdinfo.FileEntry) bool {
		if e.Isk != nil {
			e.Isk.Family = proto.Uint32(unix.AF_VSOCK)
		}
		return e.Isk != nil
	})},
	{"priority of a socket", "priority of a socket: the checkpoint has 7", setFile(func(e *fdinfo.FileEntry) bool {
		if e.Isk != nil {
			proto.Merge(e.Isk.Opts, &sk_opts.SkOptsEntry{SoPriority: proto.Uint32(7)})
		}
		return e.Isk != nil
	})},
	{"unknown entry of a tmpfs", "type '7'", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./x", Typeflag: tar.TypeCont})
	}},
}

const ttyInfoMagic = 0x59453036

func terminal(id uint32, kind tty.TtyType) *tty.TtyInfoEntry {
	no, zero := proto.Bool(false), proto.Uint32(0)
	return &tty.TtyInfoEntry{Id: &id, Type: &kind, Locked: no, Exclusive: no, PacketMode: no, Sid: zero, Pgrp: zero, Rdev: zero}
}

// TestStricterSpec compares the golden images with specs that permit less.
func TestStricterSpec(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, difference string
		do               func(*verify.Expected)
	}{
		{"read-only root", "mount of /: the checkpoint has writable", func(e *verify.Expected) { e.Spec.Root.Readonly = true }},
		{"less memory", "memory: the checkpoint has", func(e *verify.Expected) { e.Memory = 4096 }},
		{"unknown filter", "seccomp: the checkpoint has a filter, permitted is one that", func(e *verify.Expected) { e.Seccomp = nil }},
		{"unknown limits", "RLIMIT_CPU", func(e *verify.Expected) { e.Rlimits = nil }},
		{"unknown cgroups", "a controller that this node has mounted", func(e *verify.Expected) { e.Cgroups = nil }},
		{"no absent paths", "masked path /proc/kcore", func(e *verify.Expected) { e.AbsentPaths = nil }},
		{"AppArmor", "AppArmor profile", func(e *verify.Expected) { e.Spec.Process.ApparmorProfile = "p" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			expected := verifytest.Expected(t)
			tc.do(&expected)
			r, err := verify.Container(verifytest.Open(t, verifytest.Images(t, verifytest.Versions[0])), expected)
			testutil.Must(t, err)
			all := ""
			for _, d := range r.Differences {
				all += d.String() + "\n"
			}
			if !strings.Contains(all, tc.difference) {
				t.Errorf("no difference %q in %q", tc.difference, all)
			}
		})
	}
}

// TestUserWithoutRoot checks that a process of another user than root has only the ambient
// capabilities, whatever the spec grants.
func TestUserWithoutRoot(t *testing.T) {
	t.Parallel()
	all := []string{"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID", "CAP_SETUID"}
	for _, tc := range []struct {
		name    string
		uid     uint32
		ambient []string
		want    []string // differences; none: all of them must be missing
	}{
		{"root", 0, nil, nil},
		{"user", 1000, nil, []string{
			"process 1: user: the checkpoint has 0, permitted is 1000",
			"process 1: permitted capabilities: the checkpoint has CAP_KILL,CAP_NET_BIND_SERVICE,CAP_AUDIT_WRITE beyond the spec",
			"process 1: effective capabilities: the checkpoint has CAP_KILL",
		}},
		{"user with one", 1000, []string{"CAP_KILL", "CAP_SETUID"}, []string{
			"process 1: permitted capabilities: the checkpoint has CAP_NET_BIND_SERVICE,CAP_AUDIT_WRITE beyond the spec",
		}},
		{"user with the same", 1000, all, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			expected := verifytest.Expected(t)
			expected.Spec.Process.User.UID = tc.uid
			expected.Spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: all, Permitted: all, Effective: all,
				Inheritable: tc.ambient, Ambient: tc.ambient}
			r, err := verify.Container(verifytest.Open(t, verifytest.Images(t, verifytest.Versions[0])), expected)
			testutil.Must(t, err)
			text := ""
			for _, d := range r.Differences {
				text += d.String() + "\n"
			}
			for _, want := range tc.want {
				if !strings.Contains(text, want) {
					t.Errorf("no difference %q in %q", want, text)
				}
			}
			if tc.want == nil && text != "" {
				t.Errorf("differences %q", text)
			}
		})
	}
}

// TestExternalDescriptor checks that a descriptor of the launcher is only a standard stream.
func TestExternalDescriptor(t *testing.T) {
	t.Parallel()
	dir := verifytest.Images(t, verifytest.Versions[0])
	openFile(t, dir, func(e *fdinfo.FileEntry) bool {
		if e.GetId() != 19 {
			return false
		}
		e.Reg.Name, e.Reg.Ext = proto.String("key"), proto.Bool(true)
		return true
	})
	expected := verifytest.Expected(t)
	expected.ExternalFiles = []string{"key"}
	r, err := verify.Container(verifytest.Open(t, dir), expected)
	testutil.Must(t, err)
	if len(r.Differences) == 0 || !strings.Contains(r.Differences[len(r.Differences)-1].String(), "a file from outside the container") {
		t.Errorf("%q", r.Differences)
	}
}
