package criuimages_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fh"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fsnotify"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	sk_unix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
	"berth/shim/launcher/criuimages"
)

func opened(name string, flags uint32) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: proto.Uint32(7),
		Reg: &regfile.RegFileEntry{Name: &name, Flags: &flags}}
}

func socket(dir, name string) *fdinfo.FileEntry {
	s := &sk_unix.UnixSkEntry{Name: []byte(name)}
	if dir != "" {
		s.NameDir = &dir
	}
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_UNIXSK.Enum(), Id: proto.Uint32(7), Usk: s}
}

func watched(names ...string) *fdinfo.FileEntry {
	i := &fsnotify.InotifyFileEntry{}
	for _, name := range names {
		i.Wd = append(i.Wd, &fsnotify.InotifyWdEntry{FHandle: &fh.FhEntry{Path: &name}})
	}
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_INOTIFY.Enum(), Id: proto.Uint32(7), Ify: i}
}

// containerMounts is an image of mounts: a root filesystem, /proc, and a volume that has another
// proc filesystem.
func containerMounts(t *testing.T, dir string) {
	t.Helper()
	mount := func(id uint32, kind mnt.Fstype, at string, flags uint32) *mnt.MntEntry {
		number := uint32(kind)
		return &mnt.MntEntry{MntId: &id, Fstype: &number, Mountpoint: &at, Flags: &flags}
	}
	image(t, dir, "mountpoints-3.img", mounts, mount(1, mnt.Fstype_OVERLAYFS, "/", 0), mount(2, mnt.Fstype_PROC, "/proc", unix.MS_NOSUID),
		mount(3, mnt.Fstype_UNSUPPORTED, "/vol", unix.MS_RDONLY), mount(4, mnt.Fstype_PROC, "/vol/proc", 0),
		supplied(mount(5, mnt.Fstype_UNSUPPORTED, "/a", 0)), supplied(mount(6, mnt.Fstype_UNSUPPORTED, "/b", 0)))
}

// supplied makes a mount one that the launcher supplies.
func supplied(m *mnt.MntEntry) *mnt.MntEntry {
	m.ExtKey = proto.String("key")
	return m
}

// A name may have no symbolic link that CRIU could follow. Those of volumes are left to
// nosymfollow.
func TestCheckNames(t *testing.T) {
	t.Parallel()
	const link = "is a symbolic link"
	for name, tc := range map[string]struct {
		file   *fdinfo.FileEntry
		reason string // empty: permitted
		links  bool
	}{
		"root":                              {opened("/", 0), "", false},
		"file":                              {opened("/file", 0), "", false},
		"missing file":                      {opened("/none/none", 0), "", false},
		"file below a file":                 {opened("/file/none", 0), "", false},
		"stream of the launcher":            {opened("pipe:[berth-null]", 0), "", false},
		"link":                              {opened("/out", 0), `the file "/out" cannot be restored: /out is a symbolic link`, false},
		"file that is made":                 {opened("/file", unix.O_CREAT), "make or empty", false},
		"file that is emptied":              {opened("/file", unix.O_RDWR|unix.O_TRUNC), "make or empty", false},
		"link that is open itself":          {opened("/out", unix.O_NOFOLLOW), "", false},
		"file below a link":                 {opened("/out/passwd", unix.O_NOFOLLOW), "/out " + link, false},
		"file below a link, first byte":     {opened("xout/passwd", 0), "/out " + link, false},
		"file below a link in a directory":  {opened("/tmp/below/out/etc", 0), "/tmp/below/out " + link, false},
		"link to /proc":                     {opened("/toproc/1/root/etc", 0), "/toproc " + link, false},
		"volume":                            {opened("/vol/any/thing", 0), "", false},
		"out of a volume":                   {opened("/vol/../out/passwd", 0), "/out " + link, false},
		"setting":                           {opened("/proc/sys/kernel/ostype", 0), "", false},
		"/proc":                             {opened("/proc", 0), "", false},
		"status":                            {opened("/proc/17/status", 0), "", false},
		"directory of descriptors":          {opened("/proc/17/fd", 0), "", false},
		"descriptor":                        {opened("/proc/17/fd/3", 0), "/proc/17/fd/3 " + link, false},
		"node's /proc":                      {opened("/proc/self/fd/121", 0), "/proc/self " + link, false},
		"root of a process":                 {opened("/proc/17/root/etc", 0), "/proc/17/root " + link, false},
		"working directory of a thread":     {opened("/proc/17/task/18/cwd", 0), "/proc/17/task/18/cwd " + link, false},
		"program":                           {opened("/proc/17/exe", 0), "/proc/17/exe " + link, false},
		"mapping":                           {opened("/proc/17/map_files/1-2", 0), link, false},
		"namespace":                         {opened("/proc/17/ns/mnt", 0), link, false},
		"thread-self":                       {opened("/proc/thread-self/status", 0), link, false},
		"descriptor below a volume":         {opened("/vol/proc/1/fd/2", 0), link, false},
		"descriptor by way of ..":           {opened("/vol/../proc/1/fd/2", 0), link, false},
		"NUL":                               {opened("/proc/self\x00/x", 0), "not a path", false},
		"long name":                         {opened("/"+strings.Repeat("x/", 1<<16), 0), "not a path", false},
		"socket":                            {socket("", "/tmp/s"), "", false},
		"socket without a name":             {socket("", ""), "", false},
		"abstract socket":                   {socket("", "\x00/proc/self"), "", false},
		"socket with NUL":                   {socket("", "/tmp/s\x00"), "", false},
		"socket in a volume":                {socket("", "/vol/d/s"), "", false},
		"socket behind a link":              {socket("", "/run/s"), "", true},
		"socket behind two links":           {socket("", "/own/below/out/run/s"), "", true},
		"socket behind a link to a process": {socket("", "/toproc/1/root/run/s"), "/proc/self " + link, true},
		"socket behind a loop":              {socket("", "/loop/s"), "/loop " + link, false},
		"relative socket":                   {socket("/tmp", "s"), "", false},
		"relative socket behind a link":     {socket("/run", "../toproc/s"), "/proc/self " + link, false},
		"relative socket in /proc":          {socket("/proc/self/fd/121", "1/root/s"), "/proc/self " + link, false},
		"watched file":                      {watched("/file", "/tmp"), "", false},
		"watched file in /proc":             {watched("/file", "/proc/self/fd/121/sys"), "/proc/self " + link, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			containerMounts(t, dir)
			image(t, dir, "files.img", files, tc.file)
			links, err := criuimages.CheckFiles(verifytest.Open(t, dir), rootfs(t))
			refused := (*criuimages.Refused)(nil)
			switch {
			case tc.reason == "" && err != nil:
				t.Error(err)
			case tc.reason == "" && links != tc.links:
				t.Errorf("links %v", links)
			case tc.reason != "" && (!errors.As(err, &refused) || !strings.Contains(refused.Reason, tc.reason)):
				t.Errorf("%v, want %q", err, tc.reason)
			}
		})
	}
}

// WithoutLinks adds the option to all mounts but those of proc filesystems, and nothing else.
func TestWithoutLinks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	containerMounts(t, dir)
	for rootLinks, root := range map[bool]uint32{false: unix.MS_NOSYMFOLLOW, true: 0} {
		changed, err := criuimages.WithoutLinks(verifytest.Open(t, dir), rootLinks)
		testutil.Must(t, err)
		data := changed["mountpoints-3.img"]
		var have []uint32
		for data = data[8:]; len(data) > 0; {
			size, _ := protowire.ConsumeFixed32(data)
			var m mnt.MntEntry
			testutil.Must(t, proto.UnmarshalOptions{AllowPartial: true}.Unmarshal(data[4:4+size], &m))
			have = append(have, m.GetFlags())
			data = data[4+size:]
		}
		if want := []uint32{root, unix.MS_NOSUID, unix.MS_RDONLY | unix.MS_NOSYMFOLLOW, 0,
			unix.MS_NOSYMFOLLOW, unix.MS_NOSYMFOLLOW | unix.MS_SYNCHRONOUS}; !slices.Equal(have, want) {
			t.Errorf("flags %#x, want %#x", have, want)
		}
	}
}
