package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/userns"
	"berth/oci"
)

// prepareState makes the directories that pods and containers live in.
//
// The state directory is bind-mounted on itself and private, so that what a
// launcher mounts below it stays in the launcher's own mount namespace. One
// folder in it, for the pods' shm, is shared again: launchers are started ahead of
// need, and what is mounted there later must reach them.
func (m *Manager) prepareState() error {
	if err := os.MkdirAll(m.cfg.State, 0o700); err != nil {
		return fmt.Errorf("make state directory: %w", err)
	}
	if err := bindOnItself(m.cfg.State, unix.MS_PRIVATE); err != nil {
		return err
	}
	for _, dir := range []string{
		m.sharedMounts(), m.libcontainerRoot(), m.ociRoot(""), m.shimDir(""),
		m.podFiles(""), m.writableDir(""), m.trashDir(), m.emptyLayer(),
	} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make state directory: %w", err)
		}
	}
	if err := os.MkdirAll(m.cfg.NetNSDir, 0o755); err != nil {
		return fmt.Errorf("make folder of network namespaces: %w", err)
	}
	return bindOnItself(m.sharedMounts(), unix.MS_SHARED)
}

// bindOnItself makes dir a mount point with the given propagation, once: an
// earlier daemon's mount is taken over.
func bindOnItself(dir string, propagation uintptr) error {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return fmt.Errorf("resolve %s: %w", dir, err)
	}
	mounted, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(real))
	if err != nil {
		return fmt.Errorf("look for a mount at %s: %w", real, err)
	}
	if len(mounted) == 0 {
		if err := unix.Mount(real, real, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s on itself: %w", real, err)
		}
	}
	if err := unix.Mount("", real, "", propagation, ""); err != nil {
		return fmt.Errorf("set mount propagation of %s: %w", real, err)
	}
	return nil
}

// mountShm gives a pod its /dev/shm, 64 MiB as everywhere in the field.
func (m *Manager) mountShm(p *pod) error {
	dir := m.shmDir(p.id)
	failpoint.Reach("shm.make")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make shm of pod %s: %w", p.id, err)
	}
	failpoint.Reach("shm.place-made")
	mappings, err := oci.UserNamespace(p.config)
	if err != nil {
		return err
	}
	options := "mode=1777,size=67108864"
	if mappings != nil { // the pod's root owns it, as in other pods
		options += fmt.Sprintf(",uid=%d,gid=%d", mappings.HostUID(0), mappings.HostGID(0))
	}
	if l := p.rec.SELinux.Mount; l != "" {
		options += fmt.Sprintf(",context=%q", l)
	}
	err = unix.Mount("shm", dir, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options)
	if err != nil {
		return fmt.Errorf("mount shm of pod %s: %w", p.id, err)
	}
	failpoint.Reach("shm.mounted")
	return nil
}

// removePodMounts takes away the pod's shm and the pin of its user namespace.
// Containers that still have them keep their view.
func (m *Manager) removePodMounts(podID string) error {
	if err := userns.Unpin(m.usernsPath(podID)); err != nil {
		return fmt.Errorf("pod %s: %w", podID, err)
	}
	failpoint.Reach("shm.unmount")
	err := unix.Unmount(m.shmDir(podID), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && err != unix.EINVAL && err != unix.ENOENT { // not mounted, no such folder
		return fmt.Errorf("unmount shm of pod %s: %w", podID, err)
	}
	failpoint.Reach("shm.unmounted")
	for _, dir := range []string{m.shmDir(podID), m.podMounts(podID)} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove shm of pod %s: %w", podID, err)
		}
		failpoint.Reach("shm.directory-removed")
	}
	return nil
}

// discard removes a folder tree that may be large: at once from its place, then
// in the background from the trash. What is left of it, the next daemon removes.
func (m *Manager) discard(dir string) error {
	trash := filepath.Join(m.trashDir(), newID())
	failpoint.Reach("rootfs.discard")
	err := os.Rename(dir, trash)
	failpoint.Reach("rootfs.discarded")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("move %s to the trash: %w", dir, err)
	}
	m.tasks.Background.Spawn(func() { m.emptyTrash(trash) })
	return nil
}

func (m *Manager) emptyTrash(dir string) {
	failpoint.Reach("rootfs.delete")
	if err := os.RemoveAll(dir); err != nil {
		m.log.Error("remove from the trash", "path", dir, "error", err)
	}
	failpoint.Reach("rootfs.deleted")
}

// sweepTrash removes what an earlier daemon had no time to.
func (m *Manager) sweepTrash() error {
	entries, err := os.ReadDir(m.trashDir())
	if err != nil {
		return fmt.Errorf("read the trash: %w", err)
	}
	for _, e := range entries {
		m.tasks.Background.Spawn(func() { m.emptyTrash(filepath.Join(m.trashDir(), e.Name())) })
	}
	return nil
}
