package rootfs

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mountAtOld mounts with mount(2), for kernels whose overlayfs does not know
// "lowerdir+" (before Linux 6.7) or that cannot change a mount that has no place
// yet (before 5.12).
func (s Spec) mountAtOld(target string) error {
	if err := s.check(); err != nil {
		return err
	}
	if s.isDirectory() {
		return bindReadOnly(s.Layers[0].Path, target)
	}
	dirs, err := s.open()
	if err != nil {
		return err
	}
	defer dirs.close()
	if err := s.clearVolatile(); err != nil {
		return err
	}
	return mountInFDs(dirs, target)
}

func bindReadOnly(path, target string) error {
	if err := unix.Mount(path, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", path, target, err)
	}
	err := unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	if err == nil {
		err = unix.Mount("", target, "", unix.MS_PRIVATE, "")
	}
	if err != nil {
		return errors.Join(fmt.Errorf("make %s read-only: %w", target, err), unix.Unmount(target, unix.MNT_DETACH))
	}
	return nil
}

// mountInFDs names the directories by their descriptors, relative to
// /proc/self/fd as the working directory: all options of a mount must fit in
// one page, which 500 numbers do and 50 paths of layers do not, and a number has
// no ":", "," or "\" that overlayfs would have to be told not to split at.
func mountInFDs(dirs *dirs, target string) error {
	data := dirs.data()
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("mount overlay on %s: %d bytes of options do not fit in a page: %w", target, len(data), unix.E2BIG)
	}
	place, err := os.OpenFile(target, unix.O_PATH, 0)
	if err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	defer place.Close()
	err = withDir("/proc/self/fd", func() error {
		return unix.Mount("overlay", fdName(place), "overlay", 0, data)
	})
	if err != nil {
		return fmt.Errorf("mount overlay of %d layers on %s: %w", len(dirs.lower), target, err)
	}
	return nil
}

// data is the option string of mount(2).
func (d *dirs) data() string {
	lower := make([]string, 0, len(d.lower))
	for _, f := range d.lower {
		lower = append(lower, fdName(f))
	}
	all := []string{"lowerdir=" + strings.Join(lower, ":")}
	for _, o := range d.options(fdName) {
		all = append(all, o.String())
	}
	return strings.Join(all, ",")
}

func fdName(f *os.File) string { return strconv.Itoa(int(f.Fd())) }

// withDir runs f with another working directory than the process has: in a
// thread of its own that no longer shares it and that ends with f.
func withDir(dir string, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			result <- fmt.Errorf("unshare working directory: %w", err)
			return
		}
		if err := unix.Chdir(dir); err != nil {
			result <- fmt.Errorf("change to %s: %w", dir, err)
			return
		}
		result <- f()
	}()
	return <-result
}
