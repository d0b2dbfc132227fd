package verify_test

import (
	"archive/tar"
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pidns"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	sk_packet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-packet"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify"
	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
)

// Magics of images that the golden ones lack (criu/include/magic.h).
const (
	pidnsMagic     = 0x61157326
	skQueuesMagic  = 0x56264026
	commonMagic    = 0x54564319
	maxThreads     = 1 << 15
	maxDifferences = 64
)

// addImage writes an image with one entry and the bytes that follow it.
func addImage(t testing.TB, dir, name string, magic uint32, entry proto.Message, after string) {
	t.Helper()
	encoded, err := proto.MarshalOptions{AllowPartial: true}.Marshal(entry)
	testutil.Must(t, err)
	data := binary.LittleEndian.AppendUint32(nil, commonMagic)
	data = binary.LittleEndian.AppendUint32(data, magic)
	data = binary.LittleEndian.AppendUint32(data, uint32(len(encoded)))
	write(t, dir, name, string(data)+string(encoded)+after)
}

// message writes a message of a unix socket that passes a file.
func message(t testing.TB, dir string, file uint32) {
	t.Helper()
	addImage(t, dir, "sk-queues.img", skQueuesMagic, &sk_packet.SkPacketEntry{IdFor: proto.Uint32(12), Length: proto.Uint32(2),
		Scm: []*sk_packet.ScmEntry{{Type: proto.Uint32(unix.SCM_RIGHTS), Rights: []uint32{3, file}}}}, "ab")
}

// withoutEntry changes the kind of a file, whose entry is then missing.
func withoutEntry(kind fdinfo.FdTypes) func(testing.TB, string) {
	return setFile(func(e *fdinfo.FileEntry) bool { e.Type = &kind; return true })
}

// hostileMore are changes of parts that few checkpoints have.
var hostileMore = []mutation{
	{"file in a message", "message of socket 12: the checkpoint has file 999", func(t testing.TB, dir string) { message(t, dir, 999) }},
	{"external file in a message", "message of socket 12: the checkpoint has file 19", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.GetId() == 19 {
				e.Reg.Ext = proto.Bool(true)
			}
			return e.GetId() == 19
		})
		message(t, dir, 19)
	}},
	{"many threads", "threads: the checkpoint has 32769, permitted is 32768", setProcess(1, func(e *pstree.PstreeEntry) {
		for tid := uint32(1000); len(e.Threads) < maxThreads; tid++ { // and one of process 7
			e.Threads = append(e.Threads, tid)
		}
	})},
	{"process twice", "process 7: the checkpoint has two entries", func(t testing.TB, dir string) {
		data, err := os.ReadFile(filepath.Join(dir, "pstree.img"))
		testutil.Must(t, err)
		n := 8 + 4 + int(binary.LittleEndian.Uint32(data[8:])) // after the first process
		write(t, dir, "pstree.img", string(data)+string(data[n:]))
	}},
	{"content of a PID namespace", "image pidns-9.img: the checkpoint has a namespace with content", func(t testing.TB, dir string) {
		addImage(t, dir, "pidns-9.img", pidnsMagic, &pidns.PidnsEntry{}, "")
	}},
	{"FIFO without its entry", "fifo without its entry", withoutEntry(fdinfo.FdTypes_FIFO)},
	{"pidfd without its entry", "pidfd without its entry", withoutEntry(fdinfo.FdTypes_PIDFD)},
	{"terminal without its entry", "tty without its entry", withoutEntry(fdinfo.FdTypes_TTY)},
	{"seccomp mode of an old CRIU", "a filter in the form of an old CRIU", setCore(1, func(e *criu_core.CoreEntry) {
		e.Tc.OldSeccompMode = criu_core.SeccompMode_disabled.Enum()
	})},
	{"seccomp filter of an old CRIU", "a filter in the form of an old CRIU", setCore(1, func(e *criu_core.CoreEntry) {
		e.Tc.OldSeccompFilter = proto.Uint32(0)
	})},
	{"cgroup of a task", "process 1: cgroup: the checkpoint has an unknown one", setCore(1, func(e *criu_core.CoreEntry) { e.Tc.CgSet = proto.Uint32(99) })},
	{"device of the node as a mount", "an external mount with key /dev/sda", setMount("/etc/hosts", func(e *mnt.MntEntry) {
		e.ExtKey, e.Mountpoint = proto.String("/dev/sda"), proto.String("/dev/sda")
	})},
	{"size of a tmpfs that is no number", "mount of /dev/shm: size", setMount("/dev/shm", func(e *mnt.MntEntry) { e.Options = proto.String("size=x") })},
	{"size of a tmpfs with an unknown unit", "mount of /dev/shm: size", setMount("/dev/shm", func(e *mnt.MntEntry) { e.Options = proto.String("size=1z") })},
	{"number of pages in the old form", "pages for", func(t testing.TB, dir string) {
		change(t, dir, "pagemap-1.img", func(e *pagemap.PagemapEntry) bool {
			e.NrPages, e.CompatNrPages = nil, proto.Uint32(1<<30)
			return true
		})
	}},
	{"unknown field in a list", "image seccomp.img: the checkpoint has fields", func(t testing.TB, dir string) {
		path := filepath.Join(dir, "seccomp.img")
		data, err := os.ReadFile(path)
		testutil.Must(t, err)
		filter := []byte{0x0a, 0x05, 0x0a, 0x00, 0xb8, 0x3e, 0x01} // another filter, with field 999
		size := binary.LittleEndian.Uint32(data[8:]) + uint32(len(filter))
		binary.LittleEndian.PutUint32(data[8:], size)
		testutil.Must(t, os.WriteFile(path, append(data, filter...), 0o600))
	}},
	{"unknown device in a tmpfs", "the device 1:1", func(t testing.TB, dir string) {
		tmpfs(t, dir, tar.Header{Name: "./mem", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1})
	}},
}

// TestManyDifferences checks that a report has a limited length.
func TestManyDifferences(t *testing.T) {
	t.Parallel()
	if runtime.GOARCH != "amd64" {
		t.Skip("the images are those of amd64")
	}
	dir := verifytest.Images(t, verifytest.Versions[0])
	for i := range 3 * maxDifferences {
		write(t, dir, strings.Repeat("x", i+1)+".img", "")
	}
	r, err := verify.Container(verifytest.Open(t, dir), verifytest.Expected(t))
	testutil.Must(t, err)
	if len(r.Differences) != maxDifferences || r.More != 2*maxDifferences {
		t.Errorf("%d differences and %d more", len(r.Differences), r.More)
	}
}

// TestLayerOfManyFiles checks the limit of files, which bounds the time.
func TestLayerOfManyFiles(t *testing.T) {
	testutil.Long(t)
	t.Parallel()
	const maxFiles = 1 << 20
	r := &endlessTar{left: maxFiles + 1, block: tarOf(t, tar.Header{Name: "f", Typeflag: tar.TypeReg})[:512]}
	if d, err := verify.Shm(r); err == nil || !strings.Contains(err.Error(), "more than 1048576 files") {
		t.Errorf("%v, %v", d, err)
	}
}

// endlessTar repeats the header of an empty file.
type endlessTar struct {
	block []byte
	left  int
	at    int
}

func (r *endlessTar) Read(p []byte) (n int, err error) {
	for n < len(p) {
		if r.at == len(r.block) {
			r.at = 0
			r.left--
		}
		if r.left == 0 {
			return n, nil
		}
		c := copy(p[n:], r.block[r.at:])
		n += c
		r.at += c
	}
	return n, nil
}
