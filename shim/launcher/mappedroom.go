package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/launcher/criu"
)

// A room is the mount namespace in which CRIU itself runs. The restored processes are in their
// container's mount namespace. The room belongs to the node's user namespace, so CRIU cannot mount
// anything in it. It contains the images, a directory for CRIU's log and, read-only, the programs
// of the node. Its /proc shows only the processes of the pod's user namespace.

// Places in a room.
const (
	roomImages = "/images"
	roomLog    = "/log"
	roomConfig = "/criu.conf"
)

// roomConfigText is CRIU's configuration file for options that requests cannot set.
const roomConfigText = "work-dir " + roomLog + "\n"

// programDirs are the directories of programs and their libraries.
var programDirs = []string{"/usr", "/bin", "/sbin", "/lib", "/lib64"}

// enterRoom makes a room and moves this thread to it. The thread must be locked and end afterwards.
// The result is the directory of CRIU's log. CRIU can write there.
func (b *mappedRestore) enterRoom() (work *os.File, err error) {
	failpoint.Reach("launcher.enter-room")
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return nil, os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make mounts private: %w", err)
	}
	defer unix.Umask(unix.Umask(0)) // of this thread only
	room := b.workDir()
	if err := os.Mkdir(room, 0o700); err != nil {
		return nil, fmt.Errorf("make CRIU's room: %w", err)
	}
	if err := unix.Mount("tmpfs", room, "tmpfs", unix.MS_NOSUID, "mode=0755,size=256m"); err != nil {
		return nil, fmt.Errorf("mount CRIU's room: %w", err)
	}
	for _, furnish := range []func(room string) error{b.furnishPrograms, b.furnishImages, b.furnishWork} {
		if err := furnish(room); err != nil {
			return nil, fmt.Errorf("furnish CRIU's room: %w", err)
		}
	}
	if err := pivotTo(room); err != nil {
		return nil, fmt.Errorf("enter CRIU's room: %w", err)
	}
	failpoint.Reach("launcher.room-entered")
	return os.Open(roomLog)
}

// furnishPrograms shows the programs of the node, and a null device.
func (b *mappedRestore) furnishPrograms(room string) error {
	program, err := b.program()
	if err != nil {
		return err
	}
	for _, dir := range append(programDirs, filepath.Dir(program), "/etc/ld.so.cache") {
		if err := showProgram(room, dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	null := filepath.Join(room, os.DevNull)
	if err := os.Mkdir(filepath.Dir(null), 0o755); err != nil {
		return err
	}
	failpoint.Reach("launcher.make-room-null")
	if err := unix.Mknod(null, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		return fmt.Errorf("make %s: %w", null, err)
	}
	return nil
}

// showProgram shows a directory or file of the node in a room, or a symbolic link.
func showProgram(room, path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	place := filepath.Join(room, path)
	if info.Mode()&fs.ModeSymlink != 0 {
		target, err := os.Readlink(path)
		if err != nil {
			return err
		}
		failpoint.Reach("launcher.link-in-room")
		return os.Symlink(target, place)
	}
	if _, err := os.Lstat(place); err == nil {
		return nil // the directory is below another one
	}
	tree, err := cloneReadOnly(path, 0, nil)
	if err != nil {
		return err
	}
	defer tree.Close() // Close of a mount loses nothing
	return attachAt(tree, place, info.IsDir())
}

// furnishImages shows the images as files of the pod's root, changed by criu.Inside.
func (b *mappedRestore) furnishImages(room string) error {
	images, err := os.Open(b.Restore.Images)
	if err != nil {
		return err
	}
	defer images.Close() // it was only read
	changed, err := criu.Inside(images)
	if err != nil {
		return refusal(err)
	}
	users, err := os.Open(b.config.Namespaces.PathOf(configs.NEWUSER))
	if err != nil {
		return err
	}
	defer users.Close() // Close of a namespace cannot fail
	tree, err := cloneReadOnly(b.Restore.Images, unix.MOUNT_ATTR_NOEXEC, users)
	if err != nil {
		return err
	}
	defer tree.Close() // Close of a mount loses nothing
	if err := attachAt(tree, filepath.Join(room, roomImages), true); err != nil {
		return err
	}
	for name, data := range changed {
		source := filepath.Join(room, name)
		failpoint.Reach("launcher.change-image")
		if err := os.WriteFile(source, data, 0o444); err != nil {
			return err
		}
		if err := unix.Mount(source, filepath.Join(room, roomImages, name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount image %s: %w", name, err)
		}
	}
	return nil
}

// furnishWork makes the directory of CRIU's log, its configuration, and /proc.
func (b *mappedRestore) furnishWork(room string) error {
	if err := os.WriteFile(filepath.Join(room, roomConfig), []byte(roomConfigText), 0o444); err != nil {
		return err
	}
	uid, gid, err := b.hostRoot()
	if err != nil {
		return err
	}
	for _, m := range []struct{ kind, place, options string }{
		{"tmpfs", roomLog, fmt.Sprintf("mode=0700,size=16m,uid=%d,gid=%d", uid, gid)},
		{"proc", procPlace, hiding},
	} {
		place := filepath.Join(room, m.place)
		failpoint.Reach("launcher.mount-in-room")
		if err := os.Mkdir(place, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, place, m.kind, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", place, err)
		}
	}
	return nil
}

// cloneReadOnly returns a read-only copy of the mounts at path, private and without set-user-ID
// programs and devices. With a user namespace, files of root belong to root of that namespace.
func cloneReadOnly(path string, attributes uint64, users *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return nil, fmt.Errorf("copy the mount %s: %w", path, err)
	}
	tree := os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{
		Attr_set:    attributes | unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		Propagation: unix.MS_PRIVATE,
	}
	if users != nil {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(users.Fd())
	}
	failpoint.Reach("launcher.limit-mount")
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return nil, errors.Join(fmt.Errorf("limit the mount %s: %w", path, err), tree.Close())
	}
	return tree, nil
}

// attachAt mounts a copy of a mount at a new directory or file.
func attachAt(tree *os.File, place string, dir bool) error {
	parent := place
	if !dir {
		parent = filepath.Dir(place)
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	if !dir {
		if err := os.WriteFile(place, nil, 0o600); err != nil {
			return err
		}
	}
	failpoint.Reach("launcher.attach-to-room")
	err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, place, unix.MOVE_MOUNT_F_EMPTY_PATH)
	failpoint.Reach("launcher.attached-to-room")
	if err != nil {
		return fmt.Errorf("mount %s: %w", place, err)
	}
	return nil
}

// pivotTo makes a mount the root of this thread's mount namespace, read-only and without the old
// mounts.
func pivotTo(root string) error {
	failpoint.Reach("launcher.pivot")
	if err := unix.Chdir(root); err != nil {
		return os.NewSyscallError("chdir", err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return os.NewSyscallError("pivot_root", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil { // the old root is now mounted above the new root
		return fmt.Errorf("unmount the node's mounts: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return os.NewSyscallError("chdir", err)
	}
	failpoint.Reach("launcher.pivoted")
	return setReadOnly("/", 0, true)
}
