package rootfs

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mountOld implements Mount with mount(2). It is for kernels before Linux 6.7, whose overlayfs
// lacks "lowerdir+", and before 5.12, which cannot change detached mounts. mount(2) needs a mount
// point. mountOld mounts in the mount namespace of a temporary thread and keeps a detached copy of
// the mount. Other threads cannot help with an ID-mapped overlay: before Linux 6.15 all its layers
// must be in the mount namespace of the thread that calls mount(2).
func (s Spec) mountOld() (mount *os.File, err error) {
	place := s.Layers[len(s.Layers)-1].Path // any directory, because only this thread sees the mount
	err = onThread(unix.CLONE_NEWNS|unix.CLONE_FS, func() error {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mount namespace private: %w", err)
		}
		mount, err = s.mountOn(place)
		return err
	})
	return mount, err
}

// mountOn mounts on place with mount(2), and returns a copy of the mount. It changes the working
// directory of the thread.
func (s Spec) mountOn(place string) (*os.File, error) {
	switch {
	case s.IDMap != nil:
		return s.overlayMapped(place, overlayOn)
	case s.isSingle():
		return bindReadOnly(s.Layers[0].Path, place)
	}
	dirs, err := s.open()
	if err != nil {
		return nil, err
	}
	defer dirs.close()
	if err := s.clearVolatile(); err != nil {
		return nil, err
	}
	return overlayOn(dirs, place)
}

func bindReadOnly(path, place string) (*os.File, error) {
	if err := unix.Mount(path, place, "", unix.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("bind %s: %w", path, err)
	}
	if err := unix.Mount("", place, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		return nil, fmt.Errorf("make mount of %s read-only: %w", path, err)
	}
	return cloneOf(place)
}

// overlayOn implements overlayOf with mount(2). It leaves the mount on place.
func overlayOn(dirs *dirs, place string) (*os.File, error) {
	if err := mountInFDs(dirs, place); err != nil {
		return nil, err
	}
	return cloneOf(place)
}

func cloneOf(place string) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, place, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("clone mount of %s: %w", place, err)
	}
	return os.NewFile(uintptr(fd), "overlay"), nil
}

// mountInFDs names the directories by descriptor numbers, relative to the working directory
// /proc/self/fd. All options of mount(2) must fit in one page. 500 numbers fit, but 50 layer paths
// do not. Numbers also contain no ":", "," or "\", which overlayfs would treat as separators.
func mountInFDs(dirs *dirs, place string) error {
	data := dirs.data()
	if len(data) >= os.Getpagesize() {
		return fmt.Errorf("mount overlay: %d bytes of options do not fit in a page: %w", len(data), unix.E2BIG)
	}
	if err := unix.Chdir("/proc/self/fd"); err != nil {
		return fmt.Errorf("change to /proc/self/fd: %w", err)
	}
	if err := unix.Mount("overlay", place, "overlay", 0, data); err != nil {
		return fmt.Errorf("mount overlay of %d layers on %s: %w", len(dirs.lower), dirs.lower[0].Name(), orUnsupported(err))
	}
	return nil
}

// data returns the option string of mount(2).
func (d *dirs) data() string {
	lower := make([]string, 0, len(d.lower))
	for _, f := range d.lower {
		lower = append(lower, fdName(f))
	}
	all := []string{"lowerdir=" + strings.Join(lower, ":")}
	for _, w := range d.writable() {
		all = append(all, w.key+"="+fdName(w.dir))
	}
	for _, o := range d.options() {
		all = append(all, o.String())
	}
	return strings.Join(all, ",")
}

func fdName(f *os.File) string { return strconv.Itoa(int(f.Fd())) }

// onThread runs f on a thread that unshares the namespaces and attributes in flags from the
// process, and that ends with f.
func onThread(flags int, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The Go runtime never ends the main thread, and /proc/self describes the main thread.
			// This thread is kept busy here, so that the goroutine runs on another thread.
			result <- onThread(flags, f)
			runtime.UnlockOSThread()
			return
		}
		// The goroutine stays locked, so that the runtime ends the thread with it.
		if err := unix.Unshare(flags); err != nil {
			result <- fmt.Errorf("leave the process's namespaces: %w", err)
			return
		}
		result <- f()
	}()
	return <-result
}
