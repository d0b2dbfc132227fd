package host

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func TestResolve(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testutil.Must(t, os.Mkdir(filepath.Join(dir, "real"), 0o755))
	for name, to := range map[string]string{"link": "real", "dangling": "nowhere", "loop": "loop"} {
		testutil.Must(t, os.Symlink(to, filepath.Join(dir, name)))
	}
	if got, err := (Files{}).Resolve(filepath.Join(dir, "link")); err != nil || got != filepath.Join(dir, "real") {
		t.Errorf("got %s, %v", got, err)
	}
	for _, name := range []string{"missing", "dangling"} {
		if _, err := (Files{}).Resolve(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := (Files{}).Resolve(filepath.Join(dir, "loop")); err == nil {
		t.Error("resolved a link loop")
	}
}

func TestReadProfile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name string, b []byte) string {
		p := filepath.Join(dir, name)
		testutil.Must(t, os.WriteFile(p, b, 0o644))
		return p
	}
	if got, err := (Files{}).ReadProfile(write("ok", []byte("{}"))); err != nil || string(got) != "{}" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := (Files{}).ReadProfile(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	fifo := filepath.Join(dir, "fifo")
	testutil.Must(t, unix.Mkfifo(fifo, 0o644))
	for _, p := range []string{fifo, "/dev/zero", dir, write("huge", bytes.Repeat([]byte(" "), maxProfile+1))} {
		if b, err := (Files{}).ReadProfile(p); err == nil {
			t.Errorf("%s: read %d bytes", p, len(b))
		}
	}
}

func TestAppArmorLoaded(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "profiles")
	testutil.Must(t, os.WriteFile(file, []byte("docker-default (enforce)\n/usr/bin/a (b) (complain)\n"), 0o644))
	for name, want := range map[string]bool{"docker-default": true, "/usr/bin/a (b)": true, "docker": false, "/usr/bin/a": false, "": false} {
		if got, err := appArmorLoaded(file, name); err != nil || got != want {
			t.Errorf("%q: got %v, %v", name, got, err)
		}
	}
	if _, err := appArmorLoaded(file+"x", "a"); err == nil {
		t.Error("no error for a missing file")
	}
}

func TestPropagation(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "mountinfo")
	content := "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n" +
		"22 21 8:2 / /srv rw shared:5 - ext4 /dev/sdb rw\n" +
		"23 22 8:3 / /srv/a rw master:5 - ext4 /dev/sdc rw\n" +
		"24 22 8:3 / /srv/b rw shared:7 master:5 - ext4 /dev/sdc rw\n" +
		"25 24 8:4 / /srv/b rw - ext4 /dev/sdd rw\n"
	testutil.Must(t, os.WriteFile(file, []byte(content), 0o644))
	for path, want := range map[string]Propagation{
		"/var/lib":   {Mountpoint: "/"},
		"/":          {Mountpoint: "/"},
		"/srvx":      {Mountpoint: "/"},
		"/srv":       {Mountpoint: "/srv", Shared: true},
		"/srv/ab":    {Mountpoint: "/srv", Shared: true},
		"/srv/a/x/y": {Mountpoint: "/srv/a", Slave: true},
		"/srv/b":     {Mountpoint: "/srv/b"}, // the mount on top
	} {
		if got, err := propagation(file, path); err != nil || got != want {
			t.Errorf("%s: got %+v, %v, want %+v", path, got, err, want)
		}
	}
	if got, err := (Files{}).Propagation("/proc/self"); err != nil || got.Mountpoint != "/proc" {
		t.Errorf("here: got %+v, %v", got, err)
	}
}

func TestDevices(t *testing.T) {
	testutil.NeedRoot(t)
	dir := t.TempDir()
	mknod := func(name string, mode uint32, major, minor uint32) {
		p := filepath.Join(dir, name)
		testutil.Must(t, os.MkdirAll(filepath.Dir(p), 0o755))
		testutil.Must(t, unix.Mknod(p, mode, int(unix.Mkdev(major, minor))))
		testutil.Must(t, os.Chmod(p, os.FileMode(mode&0o777)))
		testutil.Must(t, os.Chown(p, 7, 8))
	}
	mknod("null", unix.S_IFCHR|0o666, 1, 3)
	mknod("sub/loop", unix.S_IFBLK|0o640, 7, 300)
	mknod("sub/pts/0", unix.S_IFCHR|0o620, 136, 0)
	mknod("console", unix.S_IFCHR|0o600, 5, 1)
	mknod("fifo", unix.S_IFIFO|0o600, 0, 0)
	testutil.Must(t, os.Symlink("null", filepath.Join(dir, "link")))
	null := Device{filepath.Join(dir, "null"), "c", 1, 3, 0o666, 7, 8}
	loop := Device{filepath.Join(dir, "sub/loop"), "b", 7, 300, 0o640, 7, 8}

	if got, err := (Files{}).Devices(dir); err != nil || !slices.Equal(got, []Device{null, loop}) {
		t.Errorf("directory: got %+v, %v", got, err)
	}
	if got, err := (Files{}).Devices(null.Path); err != nil || !slices.Equal(got, []Device{null}) {
		t.Errorf("device: got %+v, %v", got, err)
	}
	for _, name := range []string{"fifo", "link"} {
		if _, err := (Files{}).Devices(filepath.Join(dir, name)); !errors.Is(err, ErrNotDevice) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := (Files{}).Devices(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: got %v", err)
	}
}

func TestResolveReportsLinkLoop(t *testing.T) {
	t.Parallel()
	loop := filepath.Join(t.TempDir(), "loop")
	testutil.Must(t, os.Symlink("loop", loop))
	if _, err := (Files{}).Resolve(loop); !errors.Is(err, unix.ELOOP) {
		t.Errorf("got %v", err)
	}
}
