package criuimages_test

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	remap_file_path "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
	"berth/shim/launcher/criuimages"
)

// image writes an image with messages whose required fields may be missing.
func image(t testing.TB, dir, name string, magic uint32, entries ...proto.Message) {
	t.Helper()
	data := binary.LittleEndian.AppendUint32(nil, 0x54564319)
	data = binary.LittleEndian.AppendUint32(data, magic)
	for _, e := range entries {
		encoded, err := proto.MarshalOptions{AllowPartial: true}.Marshal(e)
		testutil.Must(t, err)
		data = append(binary.LittleEndian.AppendUint32(data, uint32(len(encoded))), encoded...)
	}
	testutil.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
}

const remaps, files, mounts = 0x59133954, 0x56303138, 0x55563928

func regular(id uint32, path string, mount int32) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_REG.Enum(), Id: &id,
		Reg: &regfile.RegFileEntry{Id: &id, Name: &path, MntId: &mount}}
}

func mountOf(id uint32, at string) *mnt.MntEntry { return &mnt.MntEntry{MntId: &id, Mountpoint: &at} }

func remap(original, target uint32, kind *remap_file_path.RemapType) *remap_file_path.RemapFilePathEntry {
	return &remap_file_path.RemapFilePathEntry{OrigId: &original, RemapId: &target, RemapType: kind}
}

// rootfs is a root filesystem with links that a container can make.
func rootfs(t testing.TB) *os.File {
	t.Helper()
	dir := t.TempDir()
	testutil.Must(t, os.MkdirAll(filepath.Join(dir, "tmp/below"), 0o755))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	for name, target := range map[string]string{"loop": "loop", "run": "/tmp", "toproc": "/proc/self/fd/121", "out": "/etc", "up": "../../../etc", "own": "tmp", "tmp/below/out": "/", "dangling": "none"} {
		testutil.Must(t, os.Symlink(target, filepath.Join(dir, name)))
	}
	return verifytest.Open(t, dir)
}

// TestCheckDeletedFiles checks one path at a time, as a ghost, as a link, and in the form of an old
// CRIU.
func TestCheckDeletedFiles(t *testing.T) {
	t.Parallel()
	const root, shm, volume = 10, 11, 12
	for _, tc := range []struct {
		name, path string
		mount      int32
		reason     string // empty: permitted
	}{
		{"file", "/tmp/x", root, ""},
		{"file in the root", "/x", root, ""},
		{"missing directory", "/tmp/below/none/none/x", root, ""},
		{"name that is a link", "/out", root, ""}, // only the directories above it are followed
		{"link to the node", "/out/x", root, "/out has a symbolic link"},
		{"relative link to the node", "/up/cron.d/x", root, "/up/cron.d has a symbolic link"},
		{"link in the container", "/own/x", root, "/own has a symbolic link"},
		{"link above a missing directory", "/tmp/below/out/none/none/x", root, "/tmp/below/out/none/none has a symbolic link"},
		{"dangling link", "/dangling/x", root, "/dangling has a symbolic link"},
		{"file as a directory", "/file/x", root, "/file is not a directory"},
		{"path outside", "/../etc/x", root, "not that of a file"},
		{"path with ..", "/tmp/../../x", root, "not that of a file"},
		{"relative path", "etc/x", root, "not that of a file"},
		{"root", "/", root, "not that of a file"},
		{"NUL", "/tmp/x\x00y", root, "not that of a file"},
		{"no path", "", root, "not that of a file"},
		{"shared memory", "/dev/shm/x", shm, ""},
		{"directory in shared memory", "/dev/shm/dir/x", shm, "neither on the root filesystem"},
		{"path outside shared memory", "/etc/x", shm, "neither on the root filesystem"},
		{"volume", "/data/x", volume, "neither on the root filesystem"},
		{"unknown mount", "/tmp/x", 99, "mount 99"},
		{"mount twice", "/tmp/x", 13, "mount 13"},
		{"no mount", "/tmp/x", -1, "exactly one mount"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for _, r := range []*remap_file_path.RemapFilePathEntry{
				remap(5, 1, remap_file_path.RemapType_GHOST.Enum()), remap(5, 6, remap_file_path.RemapType_LINKED.Enum()),
				remap(6, 5, remap_file_path.RemapType_LINKED.Enum()), remap(5, 1<<31|1, nil),
			} {
				dir := t.TempDir()
				image(t, dir, "remap-fpath.img", remaps, remap(9, 9, remap_file_path.RemapType_PROCFS.Enum()), r)
				image(t, dir, "files.img", files, regular(4, "/tmp/other", root), regular(5, tc.path, tc.mount), regular(6, "/tmp/link", root))
				image(t, dir, "mountpoints-3.img", mounts, mountOf(root, "/"), mountOf(shm, "/dev/shm"), mountOf(volume, "/data"),
					mountOf(13, "/"), mountOf(13, "/data"))
				_, err := criuimages.CheckFiles(verifytest.Open(t, dir), rootfs(t))
				if tc.reason == "" {
					testutil.Must(t, err)
					continue
				}
				if refused := (*criuimages.Refused)(nil); !errors.As(err, &refused) || !strings.Contains(refused.Reason, tc.reason) {
					t.Errorf("%v: %v, want %q", r, err, tc.reason)
				}
			}
		})
	}
}

// TestGolden checks the images of CRIU: /tmp/deleted is on the root filesystem.
func TestGolden(t *testing.T) {
	t.Parallel()
	for _, version := range verifytest.Versions {
		images := verifytest.Images(t, version)
		_, err := criuimages.CheckFiles(verifytest.Open(t, images), rootfs(t))
		testutil.Must(t, err)
		hostile := t.TempDir()
		testutil.Must(t, os.Symlink("/etc", filepath.Join(hostile, "tmp")))
		var refused *criuimages.Refused
		_, err = criuimages.CheckFiles(verifytest.Open(t, images), verifytest.Open(t, hostile))
		if !errors.As(err, &refused) || refused.Reason != `the deleted file "/tmp/deleted" cannot be restored: /tmp has a symbolic link` {
			t.Errorf("%s: %v", version, err)
		}
	}
}

// TestBroken checks that images that cannot be read are errors.
func TestBroken(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, text string
		do         func(t *testing.T, dir string)
	}{
		{"missing files", "no such file", func(t *testing.T, dir string) { testutil.Must(t, os.Remove(filepath.Join(dir, "files.img"))) }},
		{"missing file", "the checkpoint has no such file", func(t *testing.T, dir string) { image(t, dir, "files.img", files) }},
		{"missing mounts", "exactly one mount", func(t *testing.T, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "mountpoints-13.img")))
		}},
		{"wrong magic", "wrong magic", func(t *testing.T, dir string) { image(t, dir, "files.img", mounts) }},
		{"empty image", "wrong magic", func(t *testing.T, dir string) {
			testutil.Must(t, os.Truncate(filepath.Join(dir, "remap-fpath.img"), 0))
		}},
		{"truncated entry", "truncated", func(t *testing.T, dir string) {
			testutil.Must(t, os.Truncate(filepath.Join(dir, "remap-fpath.img"), 14))
		}},
		{"large entry", "exceeds the limit", func(t *testing.T, dir string) {
			testutil.Must(t, os.WriteFile(filepath.Join(dir, "remap-fpath.img"), []byte("\x19CVT\x54\x39\x13Y\xff\xff\xff\xff"), 0o600))
		}},
		{"symbolic link", "regular file", func(t *testing.T, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "remap-fpath.img")))
			testutil.Must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "remap-fpath.img")))
		}},
		{"FIFO", "regular file", func(t *testing.T, dir string) {
			testutil.Must(t, os.Remove(filepath.Join(dir, "remap-fpath.img")))
			testutil.Must(t, unix.Mkfifo(filepath.Join(dir, "remap-fpath.img"), 0o600))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := verifytest.Images(t, verifytest.Versions[0])
			tc.do(t, dir)
			if _, err := criuimages.CheckFiles(verifytest.Open(t, dir), rootfs(t)); err == nil || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("%v, want %q", err, tc.text)
			}
		})
	}
}

// FuzzCheckFiles replaces images by arbitrary bytes. The result may be anything but a crash.
func FuzzCheckFiles(f *testing.F) {
	images := verifytest.Images(f, verifytest.Versions[0])
	read := func(name string) []byte {
		data, err := os.ReadFile(filepath.Join(images, name))
		testutil.Must(f, err)
		return data
	}
	f.Add(read("remap-fpath.img"), read("files.img"), read("mountpoints-13.img"))
	dir, root := f.TempDir(), rootfs(f)
	f.Fuzz(func(t *testing.T, remaps, files, mounts []byte) {
		for name, data := range map[string][]byte{"remap-fpath.img": remaps, "files.img": files, "mountpoints-1.img": mounts} {
			testutil.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
		}
		_, _ = criuimages.CheckFiles(verifytest.Open(t, dir), root)
	})
}
