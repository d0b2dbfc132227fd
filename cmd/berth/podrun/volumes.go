package podrun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// makeVolumes creates the pod's emptyDir volumes and checks its hostPath volumes.
func (f *files) makeVolumes() error {
	for i := range f.pod.Spec.Volumes {
		v := &f.pod.Spec.Volumes[i]
		var err error
		if v.HostPath != nil {
			err = ensureHostPath(v.HostPath)
		} else {
			err = f.makeEmptyDir(v)
		}
		if err != nil {
			return fmt.Errorf("spec.volumes[%d]: %w", i, err)
		}
	}
	return nil
}

func (f *files) volumeDir(volume string) string { return filepath.Join(f.dir, "volumes", volume) }

// makeEmptyDir creates the volume's directory with mode 0777. If there is an fsGroup, this group
// owns it, and new files inherit the group (kubelet's SetVolumeOwnership).
func (f *files) makeEmptyDir(v *corev1.Volume) error {
	dir := f.volumeDir(v.Name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create emptyDir: %w", err)
	}
	if v.EmptyDir.Medium == corev1.StorageMediumMemory {
		if err := mountTmpfs(dir, v.EmptyDir); err != nil {
			return err
		}
	}
	mode := uint32(0o777)
	if sc := f.pod.Spec.SecurityContext; sc != nil && sc.FSGroup != nil {
		if err := os.Chown(dir, -1, int(*sc.FSGroup)); err != nil {
			return fmt.Errorf("change group of volume to fsGroup: %w", err)
		}
		mode |= unix.S_ISGID
	}
	if err := unix.Chmod(dir, mode); err != nil {
		return fmt.Errorf("chmod volume %s: %w", dir, err)
	}
	return nil
}

func mountTmpfs(dir string, e *corev1.EmptyDirVolumeSource) error {
	options := ""
	if e.SizeLimit != nil && !e.SizeLimit.IsZero() {
		options = "size=" + strconv.FormatInt(e.SizeLimit.Value(), 10)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		return fmt.Errorf("mount tmpfs at %s: %w", dir, err)
	}
	return nil
}

// fileTypes are the file types that each type of hostPath volume accepts.
var fileTypes = map[corev1.HostPathType]fs.FileMode{
	corev1.HostPathDirectory: fs.ModeDir, corev1.HostPathDirectoryOrCreate: fs.ModeDir,
	corev1.HostPathFile: 0, corev1.HostPathFileOrCreate: 0,
	corev1.HostPathSocket:  fs.ModeSocket,
	corev1.HostPathCharDev: fs.ModeDevice | fs.ModeCharDevice, corev1.HostPathBlockDev: fs.ModeDevice,
}

// ensureHostPath checks that the path has the required type, and creates it where the type allows
// that.
func ensureHostPath(h *corev1.HostPathVolumeSource) error {
	kind := corev1.HostPathUnset
	if h.Type != nil {
		kind = *h.Type
	}
	if err := createHostPath(h.Path, kind); err != nil {
		return fmt.Errorf("create hostPath: %w", err)
	}
	info, err := os.Stat(h.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("hostPath %s does not exist", h.Path)
	}
	if err != nil {
		return fmt.Errorf("hostPath: %w", err)
	}
	if want, ok := fileTypes[kind]; ok && info.Mode().Type() != want {
		return fmt.Errorf("hostPath %s is not of type %s", h.Path, kind)
	}
	return nil
}

func createHostPath(path string, kind corev1.HostPathType) error {
	switch kind {
	case corev1.HostPathDirectoryOrCreate:
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return nil // the check of its type reports the problem
		}
		return os.MkdirAll(path, 0o755)
	case corev1.HostPathFileOrCreate:
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return file.Close()
	}
	return nil
}

// unmountBelow detaches every mount at or below path, the newest first.
func unmountBelow(path string) error {
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	mounts, err := mountsBelow(real)
	if err != nil {
		return err
	}
	for _, at := range slices.Backward(mounts) {
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s: %w", at, err) // EINVAL: it was detached together with the mount above it
		}
	}
	if left, err := mountsBelow(real); err != nil || len(left) > 0 {
		return errors.Join(err, fmt.Errorf("still mounted: %s", strings.Join(left, ", ")))
	}
	return nil
}

// mountsBelow returns the mounts at or below path, the oldest first.
func mountsBelow(path string) ([]string, error) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(path))
	if err != nil {
		return nil, fmt.Errorf("list mounts below %s: %w", path, err)
	}
	paths := make([]string, len(infos))
	for i, info := range infos {
		paths[i] = info.Mountpoint
	}
	return paths, nil
}

// removeTree removes a directory and its content. It never descends into a mount, which may be a
// volume of the host.
func removeTree(dir string) error {
	if err := unmountBelow(dir); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove files of pod: %w", err)
	}
	return nil
}
