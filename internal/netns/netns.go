// Package netns makes network namespaces that last, and runs functions in them.
//
// # Contract
//
// A namespace lives at a path, as the bind mount that pins it: New and Pin make it there, or leave nothing; Remove
// takes away whatever is left of it, and may be repeated. Functions run in a namespace on a thread of
// their own, which goes back to the scheduler only in the namespace that it came from. So no other goroutine is ever in a
// foreign one, and no goroutine that such a function starts is in its.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/task"
)

// New makes a network namespace with its loopback interface up, which lives
// as long as the bind mount that pins it at path. Directories on the way are made.
// IPv6 router advertisements are not accepted in it (CVE-2020-10749: a pod could
// make itself another pod's router). AlreadyExists if there is a file at path.
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

// InNew runs fn in a network namespace made for it, on a thread of its own, as In does. Unless fn pins the namespace it
// goes, with all that is in it, when fn, its sockets and the processes that it starts have ended.
func InNew(fn func() error) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		return fn()
	})
}

// Pin does for the new network namespace at source, such as /proc/PID/ns/net,
// what New does for one of its own: that of a pod with a user namespace has to be made
// by a process in it, so that it belongs to it.
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

// pin makes the file at path and undoes that if mount fails.
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

// setUp prepares the thread's own, new namespace.
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

// refuseRouters turns off router advertisements for interfaces to come, and for those that
// the kernel puts into every new namespace (sit0, with IPv6 in IPv4 built in).
func refuseRouters() error {
	const dir = "/proc/sys/net/ipv6/conf" // it shows the namespace of the thread that opens it
	names, err := os.ReadDir(dir)
	for _, name := range names {
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name.Name(), "accept_ra"), []byte("0"), 0)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // no IPv6 in this kernel
		return fmt.Errorf("refuse router advertisements: %w", err)
	}
	return nil
}

// Remove undoes New, whatever is left of it. The namespace itself goes
// when its last process and socket do.
func Remove(path string) error {
	failpoint.Reach("netns.unpin")
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // no mount, no file
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

// In runs fn in the network namespace at path, on a thread of its own: sockets
// that fn opens stay in that namespace, goroutines that it starts are not in it.
// NotFound if there is no namespace at path; fn's error is returned as it is.
func In(path string, fn func() error) error {
	ns, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.NotFound("network namespace %s does not exist", path)
	}
	if err != nil {
		return errdefs.Internal("network namespace: %w", err)
	}
	defer ns.Close()
	return onThread(func() error {
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

// onThread runs fn, which may change the network namespace, on a locked thread. The
// thread goes back to the scheduler only after its own namespace was restored,
// and ends otherwise (Go ends the thread of a goroutine that returns locked). It
// is restored rather than always ended because a process's main thread cannot
// end, and would leave the whole process, as seen in /proc, in fn's namespace. A panic of fn is the caller's.
func onThread(fn func() error) error {
	done := make(chan task.Outcome, 1)
	go func() {
		runtime.LockOSThread()
		own, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- task.Outcome{Err: errdefs.Internal("own network namespace: %w", err)}
			return
		}
		defer own.Close()
		outcome := task.Catch(fn)
		if e := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); e == nil {
			runtime.UnlockOSThread()
		}
		done <- outcome
	}()
	outcome := <-done
	return outcome.Result()
}

// Existing returns path if a namespace is there, else "". A file without a mount is what a
// reboot may leave.
func Existing(path string) string {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, fs.ErrNotExist) || (err == nil && st.Type != unix.NSFS_MAGIC) {
		return ""
	}
	return path
}
