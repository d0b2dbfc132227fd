package launcher

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/launcher/criuimages"
	"berth/shim/proto"
)

// While CRIU opens the files of a checkpoint, binds its sockets and removes old ones, it must not
// follow symbolic links of the container. CRIU does that as root, and a restoring process holds a
// descriptor of the node's /proc, so /proc/self/fd/N/1/root is the node's root. Volumes and
// /dev/shm are shared with processes that can make a link at any time. So CRIU mounts the
// container's filesystems with the option nosymfollow, which permitLinks removes when CRIU has
// restored all files. The kernel shows names without links, so the restore of a checkpoint needs
// none.
//
// The container's proc filesystems are the exception: CRIU itself uses /proc/self/fd.
// criuimages.CheckFiles compares names below them. The root filesystem is an exception if the name
// of a socket has a link there, such as /var/run: the kernel keeps that name as the process passed
// it. No other process can change that filesystem, and CheckFiles has followed the links.

// noLinks is the option in /proc/PID/mountinfo.
const noLinks = "nosymfollow"

// forbidLinks shows CRIU the images of mounts with nosymfollow, in the namespace of this thread
// only.
func (b *restoreBackend) forbidLinks() error {
	images, err := os.Open(b.Restore.Images)
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer images.Close() // it was only read
	changed, err := criuimages.WithoutLinks(images, b.rootLinks)
	if err != nil {
		return err
	}
	for name, data := range changed {
		path := filepath.Join(b.workDir(), name)
		failpoint.Reach("launcher.change-mounts-image")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return fmt.Errorf("write image of mounts: %w", err)
		}
		err := unix.Mount(path, filepath.Join(b.Restore.Images, name), "", unix.MS_BIND, "")
		failpoint.Reach("launcher.mounts-image-changed")
		if err != nil {
			return fmt.Errorf("mount image of mounts: %w", err)
		}
	}
	return nil
}

// permitLinks makes the mounts of the process pid follow links. It refuses mounts that have
// followed links while CRIU has opened files.
func (b *restoreBackend) permitLinks(pid int) error {
	return inMounts(pid, func(mounts []*mountinfo.Info) error {
		for _, m := range mounts {
			if at := followsLinks(m, b.rootLinks); at != "" {
				return proto.Errorf(proto.FailedPrecondition, "CRIU has mounted %s without the option %s", at, noLinks)
			}
		}
		return followLinks()
	})
}

// followLinks makes all mounts of this thread follow links.
func followLinks() error {
	attr := unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NOSYMFOLLOW}
	failpoint.Reach("launcher.permit-links")
	err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &attr)
	failpoint.Reach("launcher.links-permitted")
	if errors.Is(err, unix.EINVAL) {
		return proto.Errorf(proto.FailedPrecondition, "a restore needs Linux 5.14 or later")
	}
	return os.NewSyscallError("mount_setattr", err)
}

// followsLinks returns the mount point of a mount that must not follow links and does, or "".
func followsLinks(m *mountinfo.Info, rootLinks bool) string {
	if m.FSType == "proc" || rootLinks && m.Mountpoint == "/" || slices.Contains(strings.Split(m.Options, ","), noLinks) {
		return ""
	}
	return m.Mountpoint
}
