package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// Prepare makes the directories of pods and containers.
//
// It bind-mounts the state directory on itself as a private mount, so that mounts of a launcher
// stay in the launcher's mount namespace. The directory of the pods' mounts below it is shared,
// because later mounts there must reach running launchers.
func (d Dirs) Prepare() error {
	failpoint.Reach("layout.make-state")
	if err := os.MkdirAll(d.State, 0o700); err != nil {
		return fmt.Errorf("make state directory: %w", err)
	}
	failpoint.Reach("layout.state-made")
	if err := bindOnItself(d.State, unix.MS_PRIVATE); err != nil {
		return err
	}
	for _, dir := range []string{
		d.SharedMounts(), d.Libcontainer(), d.OCI(""), d.Shim(""),
		d.PodFiles(""), d.Writable(""), d.Trash(), d.EmptyLayer(),
	} {
		failpoint.Reach("layout.make-directory")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make directory %s: %w", dir, err)
		}
		failpoint.Reach("layout.directory-made")
	}
	// It gives / of an image without layers its mode. A root that is read-only keeps the mode.
	if err := os.Chmod(d.EmptyLayer(), 0o755); err != nil && !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("set mode of the empty layer: %w", err)
	}
	failpoint.Reach("layout.empty-layer-made")
	if err := os.MkdirAll(d.NetNSs, 0o755); err != nil {
		return fmt.Errorf("make directory of network namespaces: %w", err)
	}
	failpoint.Reach("layout.netns-place-made")
	if err := bindOnItself(d.SharedMounts(), unix.MS_SHARED); err != nil {
		return err
	}
	return d.prepareRootPlace()
}

// bindOnItself makes dir a mount point with the given propagation. It keeps the mount of an earlier
// daemon.
func bindOnItself(dir string, propagation uintptr) error {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return fmt.Errorf("resolve %s: %w", dir, err)
	}
	mounted, err := mountinfo.Mounted(real) // not by the mount table, because another mount may cover this mount
	if err != nil {
		return fmt.Errorf("check for a mount at %s: %w", real, err)
	}
	if !mounted {
		failpoint.Reach("layout.bind")
		if err := unix.Mount(real, real, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s on itself: %w", real, err)
		}
		failpoint.Reach("layout.bound")
	}
	failpoint.Reach("layout.set-propagation")
	if err := unix.Mount("", real, "", propagation, ""); err != nil {
		return fmt.Errorf("set mount propagation of %s: %w", real, err)
	}
	failpoint.Reach("layout.propagation-set")
	return nil
}

// prepareRootPlace makes RootPlace on a separate private mount, so that launchers' mounts do not
// reach the host. It must exist before the first launcher gets its mount namespace.
func (d Dirs) prepareRootPlace() error {
	failpoint.Reach("layout.make-root-place")
	if err := os.MkdirAll(d.RootPlace(), 0o711); err != nil {
		return fmt.Errorf("make mount point of root filesystems: %w", err)
	}
	failpoint.Reach("layout.root-place-made")
	return bindOnItself(d.RootPlace(), unix.MS_PRIVATE)
}
