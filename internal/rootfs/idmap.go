package rootfs

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"berth/internal/cleanup"
	"berth/internal/userns"
)

// IDMap maps a root filesystem for a user namespace: files of user 0 in the layers belong to user 0
// of the namespace. Nothing changes on disk, so containers with other mappings share the layers.
// Only the writable layer has the namespace's host IDs on disk. overlayfs writes there as the
// container. In its work directory overlayfs writes as the host's root, which has no ID on an
// ID-mapped mount.
//
// IDMap needs Linux 5.19, for overlayfs on ID-mapped layers.
type IDMap struct {
	UserNS string `json:"userns"` // path of the namespace
	userns.Mappings
}

// Owner returns the IDs on the host of a file that belongs to a user and a group of the namespace.
// If m is nil, there is no mapping, and the IDs stay the same.
func (m *IDMap) Owner(uid, gid uint32) (hostUID, hostGID int) {
	if m == nil {
		return int(uid), int(gid)
	}
	return m.HostUID(uid), m.HostGID(gid)
}

// mountMapped mounts the root filesystem on place, a directory whose mount is private. It maps
// clones of the layers' mounts.
func (s Spec) mountMapped(place string) error {
	if err := s.check(); err != nil {
		return err
	}
	mount, err := s.newMapped(place)
	if err != nil {
		return err
	}
	defer mount.Close()
	return Attach(mount, place)
}

func (s Spec) newMapped(place string) (*os.File, error) {
	if s.isSingle() {
		return s.cloneMappedReadOnly()
	}
	return s.orOld(s.overlayMapped(place, func(dirs *dirs, _ string) (*os.File, error) { return overlayOf(dirs) }))
}

func (m *IDMap) open() (*os.File, error) {
	ns, err := os.Open(m.UserNS)
	if err != nil {
		return nil, fmt.Errorf("user namespace of root filesystem: %w", err)
	}
	return ns, nil
}

func (s Spec) cloneMappedReadOnly() (*os.File, error) {
	ns, err := s.IDMap.open()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	root, err := s.Layers[0].mounted()
	if err != nil {
		return nil, err
	}
	defer root.Close() // read-only
	return cloneMapped(root, ns, unix.MOUNT_ATTR_RDONLY)
}

// overlayMapped creates the overlay with newOverlay. Before Linux 6.15 overlayfs refuses detached
// mounts, so overlayMapped stacks the mapped clones on place until the overlay has opened them.
func (s Spec) overlayMapped(
	place string, newOverlay func(*dirs, string) (*os.File, error),
) (mount *os.File, err error) {
	ns, err := s.IDMap.open()
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	dirs, err := s.open()
	if err != nil {
		return nil, err
	}
	defer dirs.close()
	stack := cleanup.New()
	defer stack.Run(&err)
	for i, dir := range dirs.lower {
		mapped, err := cloneMapped(dir, ns, 0)
		if err != nil {
			return nil, err
		}
		dirs.lower[i] = mapped
		dir.Close() // O_PATH: closing cannot lose data
		if err := Attach(mapped, place); err != nil {
			return nil, err
		}
		stack.Add("unmount layer", func() error { return unix.Unmount(place, unix.MNT_DETACH) })
	}
	if err := s.clearVolatile(); err != nil {
		return nil, err
	}
	return newOverlay(dirs, place)
}

// cloneMapped returns a private bind mount of an open file, usually a directory, with the mapping
// of ns. The mount's file must not be opened by its path, because the path leads to the original
// mount (setDir).
func cloneMapped(source, ns *os.File, attributes uint64) (*os.File, error) {
	path := source.Name()
	fd, err := unix.OpenTree(int(source.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	runtime.KeepAlive(source)
	if err != nil {
		return nil, fmt.Errorf("clone mount of %s: %w", path, err)
	}
	mount := os.NewFile(uintptr(fd), "ID-mapped "+path)
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_IDMAP | attributes,
		Propagation: unix.MS_PRIVATE,
		Userns_fd:   uint64(ns.Fd()),
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr)
	runtime.KeepAlive(ns)
	if err != nil {
		return nil, errors.Join(idMapError(path, err), mount.Close())
	}
	return mount, nil
}

// idMapError adds errors.ErrUnsupported if the filesystem does not support ID-mapped mounts.
func idMapError(path string, err error) error {
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("the filesystem of %s has no ID-mapped mounts on this kernel: %w (%w)", path,
			errors.ErrUnsupported, err)
	}
	return fmt.Errorf("map the IDs of %s: %w", path, err)
}

// CheckIDMap returns an error unless path can be mounted with the mapping of the user namespace at
// ns. The error wraps errors.ErrUnsupported if the filesystem or the kernel does not support that.
func CheckIDMap(path, ns string) error {
	f, err := os.Open(ns)
	if err != nil {
		return fmt.Errorf("user namespace: %w", err)
	}
	defer f.Close()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	source := os.NewFile(uintptr(fd), path)
	defer source.Close() // O_PATH: closing cannot lose data
	mount, err := cloneMapped(source, f, 0)
	if err != nil {
		return err
	}
	return mount.Close()
}
