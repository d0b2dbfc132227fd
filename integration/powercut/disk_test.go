package powercut

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"berth/integration/harness"
	"berth/integration/powercut/blocklog"
)

// filesystem is a type of filesystem for the daemon's root.
type filesystem struct {
	name    string
	size    int64
	make    []string // command without the device
	options string   // mount options
	check   []string // checks the filesystem and changes nothing
	few     int      // number of power failures of contrib/test -all
	lazy    int      // the same of TestPowerCutLazy
}

// filesystems commit once a second if they can, so that a short run has more commits.
var filesystems = []filesystem{
	{
		name: "ext4", size: 256 << 20, options: "commit=1", few: 16, lazy: 30,
		make:  []string{"mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"},
		check: []string{"e2fsck", "-f", "-n"},
	},
	{
		name: "xfs", size: 320 << 20, few: 4, lazy: 10,
		make:  []string{"mkfs.xfs", "-q", "-K"},
		check: []string{"xfs_repair", "-n"},
	},
	{
		name: "btrfs", size: 512 << 20, options: "commit=1,nodiscard", few: 4, lazy: 10,
		make:  []string{"mkfs.btrfs", "-q", "-K"},
		check: []string{"btrfs", "check"},
	},
}

// usable skips the test if the filesystem's programs or block devices are missing.
func (f filesystem) usable(t *testing.T) {
	t.Helper()
	for _, program := range []string{f.make[0], f.check[0]} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s: %v", f.name, err)
		}
	}
}

// atomic is the number of bytes that the disks write as a unit: one block. No filesystem expects
// torn blocks, and xfs refuses to mount after one.
const atomic = 4096

// mounted is a mounted filesystem on a disk.
type mounted struct {
	filesystem
	dir    string
	device *blocklog.Attached
}

// mount mounts the filesystem of a disk at dir, until the test ends or unmount is called. Only one
// disk is mounted at dir at a time.
func (f filesystem) mount(t *testing.T, disk *blocklog.Disk, dir string) *mounted {
	t.Helper()
	m := &mounted{f, dir, attach(t, disk, makeDir(t, dir+"-device"))}
	if err := unix.Mount(m.device.Path, dir, f.name, 0, f.options); err != nil {
		harness.Must(t, errors.Join(fmt.Errorf("mount %s: %w", f.name, err), m.device.Detach()))
	}
	t.Cleanup(func() { m.unmount(t) })
	return m
}

func attach(t *testing.T, disk *blocklog.Disk, dir string) *blocklog.Attached {
	t.Helper()
	device, err := blocklog.Attach(disk, dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		t.Skipf("no block devices can be made here: %v", err)
	}
	harness.Must(t, err)
	return device
}

// unmount unmounts and checks the filesystem. It waits for launchers of a killed daemon, whose
// mount namespaces may still contain the mount.
func (m *mounted) unmount(t *testing.T) {
	t.Helper()
	if m.device == nil {
		return
	}
	harness.Eventually(t, "unmount", func() error { return unix.Unmount(m.dir, 0) })
	harness.Eventually(t, "the filesystem is mounted nowhere", m.device.Idle)
	if out, err := exec.Command(m.check[0], append(m.check[1:], m.device.Path)...).CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", m.check[0], err, out)
	}
	harness.Must(t, m.device.Detach())
	m.device = nil
}

// newDisk makes a disk with an empty filesystem.
func (f filesystem) newDisk(t *testing.T) *blocklog.Disk {
	t.Helper()
	disk := harness.Get(blocklog.New(t.TempDir(), f.size))(t)
	t.Cleanup(func() { harness.Must(t, disk.Close()) })
	device := attach(t, disk, t.TempDir())
	out, err := exec.Command(f.make[0], append(f.make[1:], device.Path)...).CombinedOutput()
	harness.Must(t, device.Detach())
	if err != nil {
		t.Fatalf("%s: %v\n%s", f.make[0], err, out)
	}
	return disk
}

// makeDir makes a directory and returns its path.
func makeDir(t *testing.T, elements ...string) string {
	t.Helper()
	dir := filepath.Join(elements...)
	harness.Must(t, os.MkdirAll(dir, 0o700))
	return dir
}
