package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"berth/internal/safefs"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Device is a device node of the host.
type Device struct {
	Path         string // path where it was found
	Type         string // "c" or "b"
	Major, Minor int64
	Mode         os.FileMode // permission bits
	UID, GID     uint32
}

// Propagation describes how a mount propagates its submounts.
type Propagation struct {
	Mountpoint string
	Shared     bool // mounts below it propagate to its peers
	Slave      bool // mounts below its master propagate to it
}

// Files reads the host's files. The zero value is ready for use.
type Files struct{}

// Resolve follows all symbolic links of a host path. The error wraps fs.ErrNotExist for a missing
// path, and unix.ELOOP for a link loop.
func (Files) Resolve(path string) (string, error) {
	resolved, err := filepath.EvalSymlinks(path)
	if err == nil {
		return resolved, nil
	}
	if _, statErr := os.Stat(path); errors.Is(statErr, unix.ELOOP) { // the library's error has no errno
		return "", statErr
	}
	return "", err
}

// maxProfile bounds a seccomp profile, in bytes. The default profile has 20 KiB.
const maxProfile = 1 << 20

// ReadProfile reads a seccomp profile that the node's administrator installed: a regular file of at
// most 1 MiB.
func (Files) ReadProfile(path string) ([]byte, error) { return safefs.ReadHostFile(path, maxProfile) }

// AppArmorLoaded reports whether the kernel has an AppArmor profile of that name.
func (Files) AppArmorLoaded(name string) (bool, error) {
	return appArmorLoaded("/sys/kernel/security/apparmor/profiles", name)
}

// appArmorLoaded searches lines of the form "name (mode)".
func appArmorLoaded(file, name string) (bool, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return false, fmt.Errorf("find AppArmor profile %s: %w", name, err)
	}
	for line := range strings.Lines(string(b)) {
		if i := strings.LastIndex(line, " ("); i >= 0 && line[:i] == name {
			return true, nil
		}
	}
	return false, nil
}

// Propagation returns the propagation of the mount that contains path. path must be free of
// symbolic links.
func (Files) Propagation(path string) (Propagation, error) {
	return propagation("/proc/self/mountinfo", path)
}

func propagation(file, path string) (Propagation, error) {
	mounts, err := readMounts(file, mountinfo.ParentsFilter(path))
	if err != nil {
		return Propagation{}, err
	}
	var at *mountinfo.Info
	for _, m := range mounts { // the deepest mount; if several are on one directory, the last, which is on top
		if at == nil || len(m.Mountpoint) >= len(at.Mountpoint) {
			at = m
		}
	}
	if at == nil {
		return Propagation{}, fmt.Errorf("no mount contains %s", path)
	}
	return Propagation{Mountpoint: at.Mountpoint, Shared: hasTag(at, "shared:"), Slave: hasTag(at, "master:")}, nil
}

// ErrNotDevice is returned by Devices for a path that is neither a device nor a directory.
var ErrNotDevice = errors.New("not a device")

// Devices returns the device at path, or all devices below the directory at path, in lexical order.
// It does not follow links. Below a directory it skips devices of the host's mounts: pseudo
// terminals, message queues and /dev/console.
func (Files) Devices(path string) ([]Device, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		d, ok := deviceOf(path, st)
		if !ok {
			return nil, fmt.Errorf("%s: %w", path, ErrNotDevice)
		}
		return []Device{d}, nil
	}
	var devices []Device
	err = filepath.WalkDir(path, func(p string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // devices appear and disappear during the walk
			return nil
		}
		if err != nil {
			return err
		}
		if e.IsDir() {
			if p != path && skippedDirs[e.Name()] {
				return filepath.SkipDir
			}
			return nil
		}
		d, err := nodeAt(p, e)
		if err != nil || d == nil {
			return err
		}
		devices = append(devices, *d)
		return nil
	})
	return devices, err
}

// skippedDirs of /dev must not appear in a container's /dev.
var skippedDirs = map[string]bool{
	"pts": true, "shm": true, "fd": true, "mqueue": true, ".lxc": true, ".lxd-mounts": true, ".udev": true,
}

// nodeAt returns the device of a directory entry, or nil if the entry is no device.
func nodeAt(path string, e fs.DirEntry) (*Device, error) {
	if e.Type()&fs.ModeDevice == 0 || e.Name() == "console" {
		return nil, nil
	}
	st, err := e.Info()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if d, ok := deviceOf(path, st); ok {
		return &d, nil
	}
	return nil, nil
}

func deviceOf(path string, st fs.FileInfo) (Device, bool) {
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || st.Mode()&fs.ModeDevice == 0 {
		return Device{}, false
	}
	d := Device{
		Path:  path,
		Type:  "b",
		Major: int64(unix.Major(sys.Rdev)),
		Minor: int64(unix.Minor(sys.Rdev)),
		Mode:  st.Mode().Perm(),
		UID:   sys.Uid,
		GID:   sys.Gid,
	}
	if st.Mode()&fs.ModeCharDevice != 0 {
		d.Type = "c"
	}
	return d, true
}
