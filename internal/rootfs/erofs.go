package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"
)

// mounted opens the directory of a layer, or mounts its image.
func (l Layer) mounted() (*os.File, error) {
	if l.Kind == EROFS {
		return l.mountImage()
	}
	return openDir(l.Path)
}

// mountImage mounts an EROFS image from its file (Linux 6.12), detached. If the layer's Mount is
// set, it duplicates the mount. Each further mount of the file would be a separate filesystem with
// a separate page cache. With SELinux, the files in the image get the label of the image's file.
// They have none of their own, and confined processes may not read files without a label.
func (l Layer) mountImage() (*os.File, error) {
	if l.Mount != nil {
		fd, err := unix.FcntlInt(l.Mount.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		runtime.KeepAlive(l.Mount)
		if err != nil {
			return nil, fmt.Errorf("duplicate the mount of %s: %w", l.Path, err)
		}
		return os.NewFile(uintptr(fd), "erofs"), nil
	}
	fsfd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open erofs filesystem: %w", orUnsupported(err))
	}
	defer unix.Close(fsfd)
	names := fileNames{}
	defer names.close()
	if err := names.set(fsfd, "source", l.Path); err != nil {
		return nil, err
	}
	for _, data := range l.Data {
		if err := names.set(fsfd, "device", data); err != nil {
			return nil, err
		}
	}
	if err := setContext(fsfd, l.Path); err != nil {
		return nil, err
	}
	if err := names.create(fsfd); err != nil {
		if errors.Is(err, unix.ENOTBLK) { // before Linux 6.12, or disabled by configuration
			err = fmt.Errorf("%w (%w)", errors.ErrUnsupported, err)
		}
		return nil, fmt.Errorf("mount image %s: %w%s", l.Path, err, messages(fsfd))
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("mount image %s: %w", l.Path, err)
	}
	return os.NewFile(uintptr(fd), "erofs"), nil
}

// fileNames are files that are open because their paths are too long for fsconfig(2). Their names
// are their descriptor numbers, relative to /proc/self/fd. Containers see an image's name in their
// mount table; see setByNumber for the reason why the name is relative.
type fileNames []*os.File

func (n *fileNames) set(fsfd int, option, path string) error {
	name := path
	if len(path) >= maxOption || !filepath.IsAbs(path) {
		fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		*n = append(*n, os.NewFile(uintptr(fd), path))
		name = strconv.Itoa(fd)
	}
	if err := unix.FsconfigSetString(fsfd, option, name); err != nil {
		return fmt.Errorf("erofs option %s=%s: %w%s", option, path, err, messages(fsfd))
	}
	return nil
}

// setContext gives all files of a new filesystem the SELinux label of a file. On a host without
// SELinux it does nothing.
func setContext(fsfd int, path string) error {
	if !selinux.GetEnabled() {
		return nil
	}
	label, err := selinux.FileLabel(path)
	if err != nil {
		return fmt.Errorf("selinux: read the label of %s: %w", path, err)
	}
	if err := set(fsfd, option{contextOption, label}); err != nil {
		return fmt.Errorf("erofs option %s=%s: %w%s", contextOption, label, err, messages(fsfd))
	}
	return nil
}

// create creates the filesystem. The kernel opens the files.
func (n *fileNames) create(fsfd int) error {
	if len(*n) == 0 {
		return unix.FsconfigCreate(fsfd)
	}
	return inFDs(func() error { return unix.FsconfigCreate(fsfd) })
}

func (n *fileNames) close() {
	for _, f := range *n {
		f.Close() // O_PATH: closing cannot lose data
	}
}

// Open mounts the layer, which must be an EROFS image, and returns the mount for its field Mount.
// The caller closes the mount.
func (l Layer) Open() (*os.File, error) {
	if l.Kind != EROFS {
		return nil, fmt.Errorf("mount layer %s of kind %q: %w", l.Path, l.Kind, errors.ErrUnsupported)
	}
	l.Mount = nil
	return l.mountImage()
}
