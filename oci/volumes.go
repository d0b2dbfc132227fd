package oci

import (
	"cmp"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// AnonymousVolume is a directory that belongs to one container, mounted where its image has a
// VOLUME. [PlaceVolumes] returns it.
type AnonymousVolume struct {
	Name string `json:"name"` // name of the directory on the host: the number of the volume in the image
	Path string `json:"path"` // in the container: clean, and free of the image's symlinks
}

const (
	// maxVolumes limits the volumes of an image. Each is a mount and a directory.
	maxVolumes = 256
	// maxVolumePath limits the path of a volume. For the mount it is appended to the path of the
	// root filesystem, and both together must not exceed PATH_MAX.
	maxVolumePath = unix.PathMax / 2
)

// PlaceVolumes decides which volumes of an image a container gets, sorted by depth and path.
// resolve follows the symlinks of the image. Its errdefs.IsBadPath errors mean that no directory
// can be at a path. Relative paths begin at the root.
//
//   - If the request mounts something at the path or at a parent of it, the volume is left out.
//   - Two volumes at one path, perhaps through a symlink, become one volume.
//   - ignored lists the volumes that cannot be directories of the container. These are the root,
//     files, paths of the kernel's filesystems and of the pod's files, and paths that are too long.
//
// The error is InvalidArgument for an image with more than maxVolumes volumes.
func PlaceVolumes(
	volumes map[string]struct{}, mounts []*runtimeapi.Mount, resolve func(string) (string, error),
) (placed []AnonymousVolume, ignored []string, err error) {
	if len(volumes) > maxVolumes {
		return nil, nil, errdefs.InvalidArgument("the image has %d volumes, more than %d", len(volumes), maxVolumes)
	}
	taken, err := mountPlaces(mounts, resolve)
	if err != nil {
		return nil, nil, err
	}
	for i, declared := range slices.Sorted(maps.Keys(volumes)) {
		at, err := placeOf(declared, resolve)
		if err != nil {
			return nil, nil, err
		}
		if at == "" {
			ignored = append(ignored, declared)
			continue
		}
		isTaken := func(dir string) bool { return isBelow(at, dir) }
		known := func(v AnonymousVolume) bool { return v.Path == at }
		if !slices.ContainsFunc(taken, isTaken) && !slices.ContainsFunc(placed, known) {
			placed = append(placed, AnonymousVolume{Name: strconv.Itoa(i), Path: at})
		}
	}
	slices.SortFunc(placed, func(a, b AnonymousVolume) int {
		return cmp.Or(strings.Count(a.Path, "/")-strings.Count(b.Path, "/"), strings.Compare(a.Path, b.Path))
	})
	return placed, ignored, nil
}

// mountPlaces returns the paths of a request's mounts without the image's symlinks.
func mountPlaces(mounts []*runtimeapi.Mount, resolve func(string) (string, error)) (places []string, err error) {
	for _, m := range mounts {
		dest, err := mountDestination(m)
		if err != nil {
			return nil, err
		}
		at, err := resolve(dest)
		if errdefs.IsBadPath(err) { // a file, perhaps, which cannot contain a volume
			at, err = dest, nil
		}
		if err != nil {
			return nil, err
		}
		places = append(places, at)
	}
	return places, nil
}

// reserved are the places of the kernel's filesystems and of the pod's files.
var reserved = []string{"/proc", "/sys", "/dev", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf"}

// placeOf returns the path of a declared volume, or "" if the container cannot have a directory
// there.
func placeOf(declared string, resolve func(string) (string, error)) (string, error) {
	if strings.IndexByte(declared, 0) >= 0 {
		return "", nil
	}
	at, err := resolve(path.Clean("/" + declared))
	if err != nil && !errdefs.IsBadPath(err) {
		return "", err
	}
	isReserved := func(dir string) bool { return isBelow(at, dir) }
	if err != nil || at == "/" || isTooLong(at) || slices.ContainsFunc(reserved, isReserved) {
		return "", nil
	}
	return at, nil
}

func isTooLong(p string) bool {
	isLong := func(name string) bool { return len(name) > unix.NAME_MAX }
	return len(p) > maxVolumePath || slices.ContainsFunc(strings.Split(p, "/"), isLong)
}

// volumeMounts returns the mounts of a container's anonymous volumes.
func volumeMounts(in ContainerInput) (mounts []specs.Mount) {
	for _, v := range in.Volumes {
		mounts = append(mounts, specs.Mount{Destination: v.Path, Type: "bind", Source: filepath.Join(in.VolumesDir, v.Name),
			Options: []string{"rbind", "rprivate", "rw"}})
	}
	return mounts
}

// DropCovered removes the mounts of anonymous volumes from a complete spec that are below another
// mount. A plugin or a CDI device has added the other mount. It takes the place of the volumes,
// like a mount of the request. A mount at the same path has replaced the volume already.
func DropCovered(spec *specs.Spec, volumes []AnonymousVolume, dir string) {
	if len(volumes) == 0 {
		return
	}
	isVolume := func(m specs.Mount) bool {
		return slices.ContainsFunc(volumes, func(v AnonymousVolume) bool { return m.Source == filepath.Join(dir, v.Name) })
	}
	others := slices.DeleteFunc(slices.Clone(spec.Mounts), isVolume)
	spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m specs.Mount) bool {
		covers := func(o specs.Mount) bool { return isBelow(m.Destination, path.Clean(o.Destination)) }
		return isVolume(m) && slices.ContainsFunc(others, covers)
	})
}
