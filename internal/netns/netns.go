// Package netns creates persistent network namespaces and runs functions in them.
//
// # Contract
//
// A namespace is identified by the path of the bind mount that pins it. New and Pin create it, or
// leave no trace after an error. Remove removes all remaining parts and may be repeated. A function
// runs in a namespace on a locked thread, which returns to the scheduler only in its original
// namespace. So no other goroutine ever runs in a foreign namespace. Goroutines that the function
// starts do not run in the namespace.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/netns/thread"
)

// New creates a network namespace with its loopback interface up and pins it at path. It creates
// missing directories. The namespace ignores IPv6 router advertisements, because a pod could pose
// as another pod's router (CVE-2020-10749). The error is AlreadyExists if path exists.
func New(path string) error {
	return pin(path, func() error {
		return InNew(func() error {
			if err := setUp(); err != nil {
				return err
			}
			return bind("/proc/thread-self/ns/net", path)
		})
	})
}

// InNew runs fn in a new network namespace, as In does. If fn does not pin the namespace, the
// namespace ends after fn: when its sockets are closed, and the processes that fn started have
// exited.
func InNew(fn func() error) error {
	return thread.Run(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		return fn()
	})
}

// Pin pins the new network namespace at source, such as /proc/PID/ns/net, and sets it up as New
// does. For a pod with a user namespace, a process in that user namespace must create the network
// namespace, so that the user namespace owns it.
func Pin(source, path string) error {
	return pin(path, func() error {
		if err := In(source, setUp); err != nil {
			return err
		}
		return bind(source, path)
	})
}

func bind(source, path string) error {
	failpoint.Reach("netns.pin")
	if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind mount: %w", err)
	}
	failpoint.Reach("netns.pinned")
	return nil
}

// pin creates the file at path and removes it again if mount fails.
func pin(path string, mount func() error) (err error) {
	undo := cleanup.New()
	defer undo.Run(&err)
	failpoint.Reach("netns.make")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return errdefs.Internal("network namespace %s: %w", path, err)
	}
	failpoint.Reach("netns.directory-made")
	if err := createMountpoint(path); err != nil {
		return err
	}
	failpoint.Reach("netns.place-made")
	undo.Add("remove network namespace "+path, func() error { return Remove(path) })
	if err := mount(); err != nil {
		return errdefs.Internal("network namespace %s: %w", path, err)
	}
	undo.Release()
	return nil
}

func createMountpoint(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if errors.Is(err, fs.ErrExist) {
		return errdefs.AlreadyExists("network namespace %s exists", path)
	}
	if err != nil {
		return errdefs.Internal("network namespace %s: %w", path, err)
	}
	return f.Close()
}

// setUp prepares the new namespace of this thread.
func setUp() error {
	if err := refuseRouters(); err != nil {
		return err
	}
	// The loopback interface has index 1 in every namespace (LOOPBACK_IFINDEX).
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1}}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// refuseRouters disables router advertisements for all interfaces. The kernel adds some interfaces
// to every new namespace (sit0, if IPv6 in IPv4 is built in).
func refuseRouters() error {
	const dir = "/proc/sys/net/ipv6/conf" // shows the namespace of the thread that opens it
	names, err := os.ReadDir(dir)
	for _, name := range names {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name.Name(), "accept_ra"), []byte("0"), 0)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // no IPv6 in this kernel
		return fmt.Errorf("disable router advertisements: %w", err)
	}
	return nil
}

// Remove undoes New and may be repeated. The namespace ends with its last process and socket.
func Remove(path string) error {
	failpoint.Reach("netns.unpin")
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // EINVAL: no mount; ENOENT: no file
			break
		}
		if err != nil {
			return errdefs.Internal("unmount network namespace %s: %w", path, err)
		}
	}
	failpoint.Reach("netns.unpinned")
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errdefs.Internal("remove network namespace: %w", err)
	}
	failpoint.Reach("netns.removed")
	return nil
}

// In runs fn in the network namespace at path, on a locked thread. Sockets that fn opens stay in
// that namespace. Goroutines that fn starts do not run in the namespace. The error is NotFound if
// path is not a namespace, otherwise fn's error.
func In(path string, fn func() error) error {
	ns, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.NotFound("network namespace %s does not exist", path)
	}
	if err != nil {
		return errdefs.Internal("network namespace: %w", err)
	}
	defer ns.Close()
	return thread.Run(func() error {
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		if errors.Is(err, unix.EINVAL) {
			return errdefs.NotFound("%s is not a network namespace", path)
		}
		if err != nil {
			return errdefs.Internal("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// Existing returns path if a namespace is mounted there, otherwise "". After a reboot the file may
// exist without a mount.
func Existing(path string) string {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, fs.ErrNotExist) || (err == nil && st.Type != unix.NSFS_MAGIC) {
		return ""
	}
	return path
}
