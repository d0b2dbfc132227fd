package launcher

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/launcher/criu"
	"berth/shim/proto"
)

// CRIU opens the files of a checkpoint, binds its sockets and removes old sockets. Meanwhile it
// must not follow symbolic links in volumes and /dev/shm, because others share them and can make a
// link at any time. CRIU opens files as root, and a restoring process holds a descriptor of the
// node's /proc, so /proc/self/fd/N/1/root is the node's root. So CRIU mounts these filesystems with
// the option nosymfollow, which permitLinks removes when CRIU has restored all files. The names in
// a checkpoint come from the kernel and contain no links, so a restore needs no links.
//
// There are two exceptions. CRIU itself uses links in the container's proc filesystems, such as
// /proc/self/fd. In the root filesystem, names of sockets may contain links, such as /var/run, and
// only the saved processes could change it.

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
	changed, err := criu.WithoutLinks(images)
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

// permitLinks makes the mounts of the processes follow links. It refuses mounts that have followed
// links while CRIU has opened files.
func permitLinks(pids []int) error {
	done := map[string]bool{}
	for _, pid := range pids {
		namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
		if err != nil && isZombie(pid) {
			continue
		}
		if err != nil {
			return fmt.Errorf("mount namespace of restored process %d: %w", pid, err)
		}
		if done[namespace] {
			continue
		}
		done[namespace] = true
		if err := permitLinksIn(pid); err != nil {
			return err
		}
	}
	return nil
}

// permitLinksIn is permitLinks for the mount namespace of one process.
func permitLinksIn(pid int) error {
	return inMounts(pid, func(mounts []*mountinfo.Info) error {
		for _, m := range mounts {
			if at := followsLinks(m); at != "" {
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
func followsLinks(m *mountinfo.Info) string {
	if m.FSType == "proc" || m.Mountpoint == "/" || slices.Contains(strings.Split(m.Options, ","), noLinks) {
		return ""
	}
	return m.Mountpoint
}

// inMounts calls do in the mount namespace of a process, with its mounts, on a thread that ends
// afterwards. The table in the process's own /proc directory has only the mounts below the root of
// that process.
func inMounts(pid int, do func([]*mountinfo.Info) error) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer namespace.Close() // Close of a namespace cannot fail
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends, because other goroutines must not use it
		done <- func() error {
			self, err := os.Open("/proc/thread-self") // the namespace has another /proc
			if err != nil {
				return err
			}
			defer self.Close() // it was only read
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return os.NewSyscallError("unshare", err)
			}
			if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
				return os.NewSyscallError("setns", err)
			}
			fd, err := unix.Openat(int(self.Fd()), "mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return os.NewSyscallError("openat", err)
			}
			table := os.NewFile(uintptr(fd), "mountinfo")
			defer table.Close() // it was only read
			mounts, err := mountinfo.GetMountsFromReader(table, nil)
			if err != nil {
				return err
			}
			return do(mounts)
		}()
	}()
	return <-done
}
