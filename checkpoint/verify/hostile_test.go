package verify_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit"
	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fh"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fown"
	criufs "github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fsnotify"
	ghost_file "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	remap_file_path "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	sk_packet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-packet"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify"
	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
)

// change decodes an image, changes its first entry that do accepts, and encodes it again.
func change[T any, P interface {
	*T
	proto.Message
}](t testing.TB, dir, name string, do func(P) bool) {
	t.Helper()
	path := filepath.Join(dir, name)
	in, err := os.Open(path)
	testutil.Must(t, err)
	image, err := crit.New(in, nil, "", false, false).Decode(P(new(T)))
	testutil.Must(t, err)
	testutil.Must(t, in.Close())
	changed := false
	for _, e := range image.Entries {
		if m, ok := e.Message.(P); ok && do(m) {
			changed = true
			break
		}
	}
	if !changed {
		t.Fatalf("%s has no such entry", name)
	}
	out, err := os.Create(path)
	testutil.Must(t, err)
	testutil.Must(t, crit.New(nil, out, "", false, false).Encode(image))
	testutil.Must(t, out.Close())
}

// core changes the image of a thread.
func core(t testing.TB, dir string, tid int, do func(*criu_core.CoreEntry)) {
	t.Helper()
	change(t, dir, fmt.Sprintf("core-%d.img", tid), func(e *criu_core.CoreEntry) bool { do(e); return true })
}

// open changes the first open file that do accepts.
func openFile(t testing.TB, dir string, do func(*fdinfo.FileEntry) bool) {
	t.Helper()
	change(t, dir, "files.img", do)
}

// renameFile gives the first open file with a path another one, and other flags.
func renameFile(t testing.TB, dir, name string, flags uint32) {
	t.Helper()
	openFile(t, dir, func(e *fdinfo.FileEntry) bool {
		if e.Reg != nil {
			e.Reg.Name, e.Reg.Flags = &name, &flags
		}
		return e.Reg != nil
	})
}

func write(t testing.TB, dir, name, content string) {
	t.Helper()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
}

// tmpfs replaces the content of a tmpfs.
func tmpfs(t testing.TB, dir string, headers ...tar.Header) {
	t.Helper()
	var data bytes.Buffer
	zipped := gzip.NewWriter(&data)
	w := tar.NewWriter(zipped)
	for _, h := range headers {
		testutil.Must(t, w.WriteHeader(&h))
	}
	testutil.Must(t, w.Close())
	testutil.Must(t, zipped.Close())
	write(t, dir, "tmpfs-dev-56.tar.gz.img", data.String())
}

// ghost changes the type and mode of the deleted file. Its content follows the entry.
func ghost(t testing.TB, dir string, mode uint32) {
	t.Helper()
	name := "ghost-file-1.img"
	data, err := os.ReadFile(filepath.Join(dir, name))
	testutil.Must(t, err)
	n := 12 + binary.LittleEndian.Uint32(data[8:])
	e := new(ghost_file.GhostFileEntry)
	testutil.Must(t, proto.Unmarshal(data[12:n], e))
	e.Mode = &mode
	entry, err := proto.Marshal(e)
	testutil.Must(t, err)
	write(t, dir, name, string(data[:8])+string(binary.LittleEndian.AppendUint32(nil, uint32(len(entry))))+string(entry)+string(data[n:]))
}

// mutation is a change of images with a part of the difference that it must make.
type mutation struct {
	name, difference string
	do               func(t testing.TB, dir string)
}

// hostile are changes of processes and files.
var hostile = []mutation{
	{"user", "process 1: user", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.Fsuid = proto.Uint32(7) })
	}},
	{"group of a thread", "thread 6: group", func(t testing.TB, dir string) {
		core(t, dir, 6, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.Sgid = proto.Uint32(7) })
	}},
	{"supplementary group", "supplementary group", func(t testing.TB, dir string) {
		core(t, dir, 7, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.Groups = append(e.ThreadCore.Creds.Groups, 6) })
	}},
	{"permitted capability", "permitted capabilities: the checkpoint has CAP_SYS_ADMIN", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.CapPrm[0] |= 1 << unix.CAP_SYS_ADMIN })
	}},
	{"bounding capability of a thread", "thread 6: bounding capabilities", func(t testing.TB, dir string) {
		core(t, dir, 6, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.CapBnd[1] |= 1 })
	}},
	{"ambient capability", "ambient capabilities", func(t testing.TB, dir string) {
		core(t, dir, 7, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.CapAmb[0] |= 1 })
	}},
	{"short capabilities", "process 1: capabilities: the checkpoint has 1 words, permitted is 2", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.CapBnd = e.ThreadCore.Creds.CapBnd[:1] })
	}},
	{"no ambient capabilities", "thread 6: capabilities: the checkpoint has 0 words, permitted is 2", func(t testing.TB, dir string) {
		core(t, dir, 6, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.CapAmb = nil })
	}},
	{"long capabilities", "3 words", func(t testing.TB, dir string) {
		core(t, dir, 7, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.CapEff = []uint32{0, 0, 1} })
	}},
	{"no_new_privs", "process 7: no_new_privs", func(t testing.TB, dir string) {
		core(t, dir, 7, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.NoNewPrivs = nil })
	}},
	{"securebits", "securebits", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.Secbits = proto.Uint32(4) })
	}},
	{"security label", "AppArmor profile or SELinux label", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds.LsmProfile = proto.String("other") })
	}},
	{"no credentials", "process 7: credentials", func(t testing.TB, dir string) {
		core(t, dir, 7, func(e *criu_core.CoreEntry) { e.ThreadCore.Creds = nil })
	}},
	{"no seccomp", "process 7: seccomp", func(t testing.TB, dir string) {
		core(t, dir, 7, func(e *criu_core.CoreEntry) { e.ThreadCore.SeccompMode, e.ThreadCore.SeccompFilter = nil, nil })
	}},
	{"other seccomp filter", "process 1: seccomp: the checkpoint has another filter", func(t testing.TB, dir string) {
		change(t, dir, "seccomp.img", func(e *seccomp.SeccompEntry) bool { e.SeccompFilters[0].Filter[0] ^= 1; return true })
	}},
	{"seccomp filter of one thread", "thread 6: seccomp", func(t testing.TB, dir string) {
		change(t, dir, "seccomp.img", func(e *seccomp.SeccompEntry) bool { e.SeccompFilters[0].Flags = nil; return true })
	}},
	{"loop of seccomp filters", "process 1: seccomp", func(t testing.TB, dir string) {
		change(t, dir, "seccomp.img", func(e *seccomp.SeccompEntry) bool { e.SeccompFilters[0].Prev = proto.Uint32(0); return true })
	}},
	{"seccomp filter without index", "process 1: seccomp", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.ThreadCore.SeccompFilter = proto.Uint32(1 << 31) })
	}},
	{"oom_score_adj", "oom_score_adj", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.Tc.OomScoreAdj = proto.Int32(-999) })
	}},
	{"resource limit", "RLIMIT_NOFILE", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.Tc.Rlimits.Rlimits[7].Max = proto.Uint64(1025) })
	}},
	{"real-time scheduling", "scheduling policy", func(t testing.TB, dir string) {
		core(t, dir, 6, func(e *criu_core.CoreEntry) { e.ThreadCore.SchedPolicy = proto.Uint32(1) })
	}},
	{"login user", "login user", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.Tc.Loginuid = proto.Uint32(0) })
	}},
	{"personality", "personality", func(t testing.TB, dir string) {
		core(t, dir, 1, func(e *criu_core.CoreEntry) { e.Tc.Personality = proto.Uint32(0x400000) })
	}},
	{"cgroup of a thread", "process 7: cgroup", func(t testing.TB, dir string) {
		core(t, dir, 7, func(e *criu_core.CoreEntry) { e.ThreadCore.CgSet = proto.Uint32(1) })
	}},
	{"node's PID namespace", "pid namespace: the checkpoint has the node's", func(t testing.TB, dir string) {
		change(t, dir, "ids-1.img", func(e *criu_core.TaskKobjIdsEntry) bool { e.PidNsId = proto.Uint32(1); return true })
	}},
	{"second mount namespace", "mount namespace: the checkpoint has one of its own, permitted is that of the first", func(t testing.TB, dir string) {
		change(t, dir, "ids-7.img", func(e *criu_core.TaskKobjIdsEntry) bool { e.MntNsId = proto.Uint32(99); return true })
	}},
	{"network namespace with content", "image netns-10.img", func(t testing.TB, dir string) {
		change(t, dir, "netns-10.img", func(e *netdev.NetnsEntry) bool { e.ExtKey = nil; return true })
	}},
	{"open file on another mount", "on mount 999", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Reg != nil {
				e.Reg.MntId = proto.Int32(999)
			}
			return e.Reg != nil
		})
	}},
	{"open file outside", "the path /../etc/shadow", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Reg != nil {
				e.Reg.Name = proto.String("/../etc/shadow")
			}
			return e.Reg != nil
		})
	}},
	{"memory of a process", "no file of a process", func(t testing.TB, dir string) { renameFile(t, dir, "/proc/7/mem", 0) }},
	{"link of a process", "no file of a process", func(t testing.TB, dir string) { renameFile(t, dir, "/proc/self/fd/121", 0) }},
	{"open file that is made", "make or empty a file", func(t testing.TB, dir string) { renameFile(t, dir, "/new", unix.O_CREAT) }},
	{"open file that is emptied", "make or empty a file", func(t testing.TB, dir string) {
		renameFile(t, dir, "/etc/passwd", unix.O_RDWR|unix.O_TRUNC)
	}},
	{"mapped file that is emptied", "make or empty a file", func(t testing.TB, dir string) {
		change(t, dir, "mm-1.img", func(e *mm.MmEntry) bool {
			for _, v := range e.Vmas {
				if v.GetFd() == -1 && v.Fdflags != nil {
					*v.Fdflags |= unix.O_TRUNC
				}
			}
			return true
		})
	}},
	{"deleted symbolic link", "a file of type 120000", func(t testing.TB, dir string) { ghost(t, dir, unix.S_IFLNK|0o777) }},
	{"external file", "the external file file[1:2]", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Reg != nil {
				e.Reg.Name, e.Reg.Ext = proto.String("file[1:2]"), proto.Bool(true)
			}
			return e.Reg != nil
		})
	}},
	{"unknown kind of file", "tunf", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool { e.Type = fdinfo.FdTypes_TUNF.Enum(); return true })
	}},
	{"sender of signals", "sender of signals", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Efd != nil {
				e.Efd.Fown.Pid, e.Efd.Fown.Euid = proto.Uint32(1), proto.Uint32(5)
			}
			return e.Efd != nil
		})
	}},
	{"inotify by file handle", "inotify watch", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Efd == nil {
				return false
			}
			n := proto.Uint32(0)
			e.Type, e.Efd = fdinfo.FdTypes_INOTIFY.Enum(), nil
			e.Ify = &fsnotify.InotifyFileEntry{Id: e.Id, Flags: n, Fown: &fown.FownEntry{Uid: n, Euid: n, Signum: n, PidType: n, Pid: n},
				Wd: []*fsnotify.InotifyWdEntry{{Id: n, IIno: proto.Uint64(2), Mask: n, IgnoredMask: n, SDev: n, Wd: n,
					FHandle: &fh.FhEntry{Bytes: n, Type: n}}}}
			return true
		})
	}},
	{"descriptor of another kind", "that is not in the images", func(t testing.TB, dir string) {
		change(t, dir, "fdinfo-2.img", func(e *fdinfo.FdinfoEntry) bool { e.Id = proto.Uint32(9999); return true })
	}},
	{"root directory", "root directory", func(t testing.TB, dir string) {
		change(t, dir, "fs-1.img", func(e *criufs.FsEntry) bool { e.RootId = proto.Uint32(4); return true })
	}},
	{"program", "process 1: program", func(t testing.TB, dir string) {
		change(t, dir, "mm-1.img", func(e *mm.MmEntry) bool { e.ExeFileId = proto.Uint32(4); return true })
	}},
	{"packet mapping", "process 1: mapping", func(t testing.TB, dir string) {
		change(t, dir, "mm-1.img", func(e *mm.MmEntry) bool { e.Vmas[0].Status = proto.Uint32(1 << 11); return true })
	}},
	{"pages of a parent", "pages of another checkpoint", func(t testing.TB, dir string) {
		change(t, dir, "pagemap-1.img", func(e *pagemap.PagemapEntry) bool { e.Flags = proto.Uint32(1); return true })
	}},
	{"too few pages", "pages for", func(t testing.TB, dir string) {
		testutil.Must(t, os.Truncate(filepath.Join(dir, "pages-3.img"), 4096))
	}},
	{"plugins of CRIU", "plugins of CRIU", func(t testing.TB, dir string) {
		change(t, dir, "inventory.img", func(e *inventory.InventoryEntry) bool {
			e.PluginsEntry = &inventory.PluginsEntry{Plugins: []string{"cuda_plugin"}}
			return true
		})
	}},
	{"orphan", "process 7: parent", func(t testing.TB, dir string) {
		change(t, dir, "pstree.img", func(e *pstree.PstreeEntry) bool {
			if e.GetPid() == 7 {
				e.Ppid = proto.Uint32(3)
			}
			return e.GetPid() == 7
		})
	}},
	{"device in a tmpfs", "the device 8:0", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./sda", Typeflag: tar.TypeBlock, Devmajor: 8})
	}},
	{"file outside a tmpfs", "a path outside", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "../../x", Typeflag: tar.TypeReg})
	}},
	{"file behind a link in a tmpfs", "a file below a symbolic link", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./l", Typeflag: tar.TypeSymlink, Linkname: "/"}, tar.Header{Name: "./l/x", Typeflag: tar.TypeReg})
	}},
	{"set-id file in a tmpfs", "a set-id file", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./su", Typeflag: tar.TypeReg, Mode: 0o4755})
	}},
	{"set-id link in a tmpfs", "a set-id file", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./su", Typeflag: tar.TypeLink, Linkname: "./x", Mode: 0o4755})
	}},
	{"link through a link in a tmpfs", "a link to ./l/shadow", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./l", Typeflag: tar.TypeSymlink, Linkname: "/etc"},
			tar.Header{Name: "./x", Typeflag: tar.TypeLink, Linkname: "./l/shadow"})
	}},
	{"link to the node in a tmpfs", "a link to /etc/shadow", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./x", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"})
	}},
	{"file capabilities in a tmpfs", "the extended attribute security.capability", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./x", Typeflag: tar.TypeReg, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x"}})
	}},
	{"long path in a tmpfs", "a long path", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: strings.Repeat("x", 5000), Typeflag: tar.TypeReg})
	}},
	{"many links in a tmpfs", "more data or files", func(t testing.TB, dir string) {
		var links []tar.Header
		for i := range 1<<14 + 1 {
			links = append(links, tar.Header{Name: fmt.Sprint(i), Typeflag: tar.TypeSymlink, Linkname: "x"})
		}
		tmpfs(t, dir, links...)
	}},
	{"device as a deleted file", "a device or a file of type", func(t testing.TB, dir string) {
		ghost(t, dir, unix.S_IFBLK|0o600)
	}},
	{"set-id deleted file", "a set-id file", func(t testing.TB, dir string) { ghost(t, dir, unix.S_IFREG|0o4755) }},
	{"deleted file without a file", "deleted file 999: the checkpoint has no file", func(t testing.TB, dir string) {
		change(t, dir, "remap-fpath.img", func(e *remap_file_path.RemapFilePathEntry) bool { e.OrigId = proto.Uint32(999); return true })
	}},
	{"deleted file that links to a socket", "deleted file 19: the checkpoint has a link to file 12", func(t testing.TB, dir string) {
		change(t, dir, "remap-fpath.img", func(e *remap_file_path.RemapFilePathEntry) bool {
			e.RemapType, e.RemapId = remap_file_path.RemapType_LINKED.Enum(), proto.Uint32(12)
			return true
		})
	}},
	{"streams", "standard streams", func(t testing.TB, dir string) {
		write(t, dir, "descriptors.json", `["","","","pipe:[1]"]`)
	}},
	{"stream that is a path outside", "standard stream 1", func(t testing.TB, dir string) {
		write(t, dir, "descriptors.json", `["","pipe:[1]\u0000",""]`)
	}},
	{"unknown image", "image autofs.img", func(t testing.TB, dir string) { write(t, dir, "autofs.img", "") }},
	{"image of AppArmor policies", "image apparmor.img", func(t testing.TB, dir string) { write(t, dir, "apparmor.img", "") }},
	{"SysV shared memory", "image ipcns-shm-11.img", func(t testing.TB, dir string) { write(t, dir, "ipcns-shm-11.img", "") }},
	{"network configuration", "image iptables-10.img", func(t testing.TB, dir string) { write(t, dir, "iptables-10.img", "*nat") }},
	{"unknown field", "image pstree.img: the checkpoint has fields", func(t testing.TB, dir string) {
		path := filepath.Join(dir, "pstree.img")
		data, err := os.ReadFile(path)
		testutil.Must(t, err)
		binary.LittleEndian.PutUint32(data[8:], binary.LittleEndian.Uint32(data[8:])+3)
		n := 12 + int(binary.LittleEndian.Uint32(data[8:])) - 3
		data = append(data[:n:n], append([]byte{0xb8, 0x3e, 1}, data[n:]...)...) // field 999
		testutil.Must(t, os.WriteFile(path, data, 0o600))
	}},
}

// TestHostileImages changes one property of images at a time. Each must be the difference.
func TestHostileImages(t *testing.T) {
	t.Parallel()
	if runtime.GOARCH != "amd64" {
		t.Skip("the images are those of amd64")
	}
	for _, tc := range slices.Concat(hostile, hostileProcesses, hostileMounts, hostileCgroups, hostileSockets, hostileMore) {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := verifytest.Images(t, verifytest.Versions[0])
			tc.do(t, dir)
			r, err := verify.Container(verifytest.Open(t, dir), verifytest.Expected(t))
			testutil.Must(t, err)
			for _, d := range r.Differences {
				if strings.Contains(d.String(), tc.difference) {
					return
				}
			}
			t.Errorf("no difference %q in %q", tc.difference, r.Differences)
		})
	}
}

// TestBrokenImages checks that images that cannot be decoded within the limits are errors.
func TestBrokenImages(t *testing.T) {
	t.Parallel()
	prefix := func(t testing.TB, dir, name string, n int) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		testutil.Must(t, err)
		return string(data[:n])
	}
	for _, tc := range []struct {
		name, text string
		do         func(t testing.TB, dir string)
	}{
		{"entry of 4 GiB", "exceeds the limits", func(t testing.TB, dir string) {
			write(t, dir, "files.img", prefix(t, dir, "files.img", 8)+"\xff\xff\xff\xff")
		}},
		{"truncated entry", "truncated", func(t testing.TB, dir string) {
			write(t, dir, "files.img", prefix(t, dir, "files.img", 20))
		}},
		{"truncated length", "truncated", func(t testing.TB, dir string) {
			write(t, dir, "files.img", prefix(t, dir, "files.img", 10))
		}},
		{"truncated data of a pipe", "truncated", func(t testing.TB, dir string) {
			write(t, dir, "pipes-data.img", prefix(t, dir, "pipes-data.img", 38))
		}},
		{"garbage", "decode", func(t testing.TB, dir string) {
			write(t, dir, "pstree.img", prefix(t, dir, "pstree.img", 8)+"\x04\x00\x00\x00\xff\xff\xff\xff")
		}},
		{"other kind of image", "wrong magic", func(t testing.TB, dir string) {
			write(t, dir, "pstree.img", prefix(t, dir, "core-1.img", 200))
		}},
		{"two entries", "2 entries", func(t testing.TB, dir string) {
			all := prefix(t, dir, "fs-1.img", 18)
			write(t, dir, "fs-1.img", all+all[8:])
		}},
		{"no processes", "no processes", func(t testing.TB, dir string) {
			write(t, dir, "pstree.img", prefix(t, dir, "pstree.img", 8))
		}},
		{"missing thread", "core-6.img", func(t testing.TB, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "core-6.img")))
		}},
		{"symbolic link", "too many levels of symbolic links", func(t testing.TB, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "pstree.img")))
			testutil.Must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "pstree.img")))
		}},
		{"FIFO", "not a regular file", func(t testing.TB, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "pstree.img")))
			testutil.Must(t, unix.Mkfifo(filepath.Join(dir, "pstree.img"), 0o600))
		}},
		{"truncated message", "truncated", func(t testing.TB, dir string) {
			addImage(t, dir, "sk-queues.img", skQueuesMagic, &sk_packet.SkPacketEntry{IdFor: proto.Uint32(12), Length: proto.Uint32(5)}, "abcd")
		}},
		{"deleted file of another kind", "wrong magic", func(t testing.TB, dir string) {
			write(t, dir, "ghost-file-1.img", prefix(t, dir, "files.img", 60))
		}},
		{"truncated deleted file", "ghost-file-1.img", func(t testing.TB, dir string) {
			write(t, dir, "ghost-file-1.img", prefix(t, dir, "ghost-file-1.img", 14))
		}},
		{"empty image", "read magic", func(t testing.TB, dir string) { write(t, dir, "files.img", "") }},
		{"truncated content of a tmpfs", "tmpfs-dev-56.tar.gz.img", func(t testing.TB, dir string) {
			write(t, dir, "tmpfs-dev-56.tar.gz.img", prefix(t, dir, "tmpfs-dev-56.tar.gz.img", 40))
		}},
		{"no list of streams", "descriptors.json", func(t testing.TB, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "descriptors.json")))
		}},
		{"no gzip", "gzip", func(t testing.TB, dir string) { write(t, dir, "tmpfs-dev-56.tar.gz.img", "not compressed data") }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := verifytest.Images(t, verifytest.Versions[0])
			tc.do(t, dir)
			r, err := verify.Container(verifytest.Open(t, dir), verifytest.Expected(t))
			if err == nil || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("%+v: %v; want %q", r, err, tc.text)
			}
		})
	}
}

// TestStatus compares lines of /proc/PID/status.
func TestStatus(t *testing.T) {
	t.Parallel()
	const good = "Name:\tprog\nPid:\t5\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t0 2000 \nCapInh:\t0000000000000000\n" +
		"CapPrm:\t0000000020000420\nCapEff:\t0000000020000420\nCapBnd:\t0000000020000420\nCapAmb:\t0000000000000000\n" +
		"NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n"
	if d := verify.Status([]byte(good), verifytest.Expected(t)); len(d) > 0 {
		t.Error(d)
	}
	for _, tc := range []struct{ old, changed, field string }{
		{"Uid:\t0\t0", "Uid:\t0\t1", "process 5: user"},
		{"Uid:\t0\t0\t0\t0", "Uid:\t0", "process 5: Uid"},
		{"Gid:\t0", "Gid:\t9", "process 5: group"},
		{"0 2000", "0 2001", "process 5: supplementary group"},
		{"CapBnd:\t0000000020000420", "CapBnd:\t0000000020200420", "process 5: bounding capabilities"},
		{"CapEff:\t0000000020000420", "CapEff:\tx", "process 5: CapEff"},
		{"CapAmb:", "CapXyz:", "process 5: CapAmb"},
		{"NoNewPrivs:\t1", "NoNewPrivs:\t0", "process 5: no_new_privs"},
		{"Seccomp:\t2", "Seccomp:\t0", "process 5: seccomp"},
		{"Groups:", "Groupz:", "process 5: Groups"},
	} {
		d := verify.Status([]byte(strings.Replace(good, tc.old, tc.changed, 1)), verifytest.Expected(t))
		if len(d) == 0 || d[0].Field != tc.field {
			t.Errorf("%s: %v", tc.changed, d)
		}
	}
}

// FuzzContainer replaces one image by arbitrary bytes. The result may be anything but a crash.
func FuzzContainer(f *testing.F) {
	dir := verifytest.Images(f, verifytest.Versions[0])
	names, err := os.ReadDir(dir)
	testutil.Must(f, err)
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(dir, name.Name()))
		testutil.Must(f, err)
		if !strings.HasPrefix(name.Name(), "pages-") {
			f.Add(name.Name(), data)
		}
	}
	expected := verifytest.Expected(f)
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		path := filepath.Join(dir, name)
		original, err := os.ReadFile(path)
		if err != nil || strings.ContainsAny(name, "/\x00") {
			t.Skip()
		}
		testutil.Must(t, os.WriteFile(path, data, 0o600))
		defer func() { testutil.Must(t, os.WriteFile(path, original, 0o600)) }()
		_, _ = verify.Container(verifytest.Open(t, dir), expected)
	})
}
