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

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"berth/cmd/berth/podyaml"
)

// makeVolumes creates the pod's volumes and checks its hostPath volumes.
func (f *files) makeVolumes(plan *podyaml.Plan) error {
	for i := range f.pod.Spec.Volumes {
		v := &f.pod.Spec.Volumes[i]
		var err error
		switch {
		case v.HostPath != nil:
			err = ensureHostPath(v.HostPath)
		case v.PersistentVolumeClaim != nil:
			err = f.makeClaim(v.PersistentVolumeClaim.ClaimName)
		case podyaml.HasFiles(v):
			err = f.makeFileVolume(plan, v)
		case v.EmptyDir != nil:
			err = f.makeEmptyDir(v)
		}
		if err != nil {
			return fmt.Errorf("spec.volumes[%d]: %w", i, err)
		}
	}
	return nil
}

func (f *files) volumeDir(volume string) string { return filepath.Join(f.dir, "volumes", volume) }

// makeEmptyDir creates the volume's directory with mode 0777, unless the manifest sets another.
// With an fsGroup that group owns it, can write to it, and new files inherit the group (kubelet's
// SetVolumeOwnership).
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
	if m := v.EmptyDir.Mode; m != nil {
		mode = uint32(*m)
	}
	return f.setOwnership(dir, mode)
}

// setOwnership sets the mode of a volume's directory, and its group with an fsGroup.
func (f *files) setOwnership(dir string, mode uint32) error {
	if sc := f.pod.Spec.SecurityContext; sc != nil && sc.FSGroup != nil {
		if err := os.Chown(dir, -1, int(*sc.FSGroup)); err != nil {
			return fmt.Errorf("change group of volume to fsGroup: %w", err)
		}
		mode |= unix.S_ISGID | 0o770
	}
	if err := unix.Chmod(dir, mode); err != nil {
		return fmt.Errorf("chmod volume %s: %w", dir, err)
	}
	return nil
}

// makeClaim creates the directory of a persistent volume claim. A later pod with the same claim
// gets the same directory with its content.
func (f *files) makeClaim(claim string) error {
	dir := claimDir(f.claims, f.pod.Namespace, claim)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return fmt.Errorf("create directory of claims: %w", err)
	}
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("create directory of claim: %w", err)
	}
	return f.setOwnership(dir, 0o777)
}

// makeFileVolume creates a volume with files from the manifest. As in kubelet, files of Secrets are
// in a tmpfs, so that they never reach the disk.
func (f *files) makeFileVolume(plan *podyaml.Plan, v *corev1.Volume) error {
	files, err := plan.VolumeFiles(v)
	if err != nil {
		return err
	}
	dir := f.volumeDir(v.Name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create volume: %w", err)
	}
	if v.Secret != nil || v.Projected != nil {
		if err := mountTmpfs(dir, &corev1.EmptyDirVolumeSource{}); err != nil {
			return err
		}
	}
	for _, file := range files {
		if err := f.writeVolumeFile(dir, file); err != nil {
			return fmt.Errorf("write %s: %w", file.Path, err)
		}
	}
	return f.setOwnership(dir, 0o755)
}

// writeVolumeFile writes one file of a volume. With an fsGroup that group can read it.
func (f *files) writeVolumeFile(dir string, file podyaml.File) error {
	path := filepath.Join(dir, file.Path)
	if err := f.makeParents(dir, filepath.Dir(file.Path)); err != nil {
		return err
	}
	if err := os.WriteFile(path, file.Content, 0o600); err != nil {
		return err
	}
	mode := fs.FileMode(file.Mode)
	if sc := f.pod.Spec.SecurityContext; sc != nil && sc.FSGroup != nil {
		if err := os.Chown(path, -1, int(*sc.FSGroup)); err != nil {
			return err
		}
		mode |= 0o440
	}
	return os.Chmod(path, mode)
}

// makeParents creates the directories of a volume's file. Any user may enter them, whatever the
// umask.
func (f *files) makeParents(dir, parents string) error {
	for _, name := range strings.Split(parents, string(filepath.Separator)) {
		dir = filepath.Join(dir, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			return err
		}
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

// source returns the host path of a volume mount: the volume, or with a subPath a bind mount of
// that path in the volume.
func (f *files) source(c podyaml.Container, mount int, subPath string) (string, error) {
	root, err := f.volume(c.VolumeMounts[mount].Name)
	if err != nil || subPath == "" {
		return root, err
	}
	at := filepath.Join(f.dir, "subpaths", c.Name, strconv.Itoa(mount))
	if err := exposeSubPath(root, subPath, at); err != nil {
		return "", fmt.Errorf("subPath %s: %w", subPath, err)
	}
	return at, nil
}

func (f *files) volume(name string) (string, error) {
	for i := range f.pod.Spec.Volumes {
		v := &f.pod.Spec.Volumes[i]
		switch {
		case v.Name != name:
		case v.HostPath != nil:
			return v.HostPath.Path, nil
		case v.PersistentVolumeClaim != nil:
			return claimDir(f.claims, f.pod.Namespace, v.PersistentVolumeClaim.ClaimName), nil
		default:
			return f.volumeDir(name), nil
		}
	}
	return "", fmt.Errorf("no volume %q", name)
}

// exposeSubPath bind-mounts root/subPath at the given place. It resolves the path inside the
// volume, so that links cannot lead out. It mounts exactly the file that it found, because
// containers may change the volume meanwhile (CVE-2017-1002101, CVE-2021-25741). It creates a
// missing directory, as kubelet does.
func exposeSubPath(root, subPath, at string) error {
	found, err := openSubPath(root, subPath)
	if err != nil {
		return err
	}
	defer func() { _ = found.Close() }() // opened with O_PATH
	if err := unmountBelow(at); err != nil {
		return err // from an earlier attempt of the container
	}
	if err := makeMountPoint(found, at); err != nil {
		return err
	}
	if err := unix.Mount(fdPath(found), at, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind-mount at %s: %w", at, err)
	}
	return nil
}

func openSubPath(root, subPath string) (*os.File, error) {
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }() // opened with O_PATH
	found, err := pathrs.OpenatInRoot(dir, subPath)
	if errors.Is(err, fs.ErrNotExist) {
		return makeSubPath(dir, subPath)
	}
	return found, err
}

// makeSubPath creates a directory with the volume's own mode, so that the same users can use it,
// for example its fsGroup.
func makeSubPath(volume *os.File, subPath string) (made *os.File, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(volume.Fd()), &st); err != nil {
		return nil, fmt.Errorf("stat volume: %w", err)
	}
	made, err = pathrs.MkdirAllHandle(volume, subPath, 0o750)
	if err != nil {
		return nil, err
	}
	if err := unix.Chmod(fdPath(made), st.Mode&0o7777); err != nil {
		return nil, errors.Join(fmt.Errorf("chmod: %w", err), made.Close())
	}
	return made, nil
}

// fdPath returns a path to an open file, for calls that take no descriptor or, like fchmod, none
// opened with O_PATH.
func fdPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// makeMountPoint creates a directory or a file, like the object to be mounted there.
func makeMountPoint(what *os.File, at string) error {
	info, err := what.Stat()
	if err != nil {
		return err
	}
	if err := os.RemoveAll(at); err != nil { // an earlier attempt's; nothing is mounted on it
		return err
	}
	if info.IsDir() {
		return os.MkdirAll(at, 0o700)
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
		return err
	}
	return os.WriteFile(at, nil, 0o600)
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
			return fmt.Errorf("unmount %s: %w", at, err) // EINVAL: detached with the one above it
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
