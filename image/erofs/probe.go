package erofs

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/rootfs"
	"berth/internal/safefs"
)

// probeContent is what the probe's only file holds.
const probeContent = "berth"

// Probe finds out whether images in dir can be used as layers: it makes one there, mounts it from its file, puts an
// overlay on it and reads a file. The files have no names and the mounts no places, so nothing can be left of them. The kernel must
// mount EROFS from files (Linux 6.12), of the filesystem that dir is on (not a tmpfs), and put an overlay on a mount that has no
// place (Linux 6.15); else the error is errors.ErrUnsupported. Any other error says nothing about that: it was a lack of room, of
// descriptors, of memory.
func Probe(dir string) error {
	if err := probe(dir); err != nil {
		return fmt.Errorf("probe EROFS in %s: %w", dir, err)
	}
	return nil
}

func probe(dir string) error {
	image, err := unnamed(dir)
	if err != nil {
		return err
	}
	defer image.Close() // with which it is gone
	data, err := unnamed(dir)
	if err != nil {
		return err
	}
	defer data.Close()
	if err := writeProbe(image, data); err != nil {
		return err
	}
	// An overlay that cannot be written to takes two layers, and none twice.
	var spec rootfs.Spec
	for range 2 {
		l := rootfs.Layer{Kind: rootfs.EROFS, Path: pathOf(image), Data: []string{pathOf(data)}}
		if l.Mount, err = l.Open(); err != nil {
			return judge(err)
		}
		defer l.Mount.Close() // takes the mount away
		spec.Layers = append(spec.Layers, l)
	}
	overlay, err := spec.Mount()
	if err != nil {
		return judge(err)
	}
	defer overlay.Close()
	content, err := safefs.ReadFile(overlay, "file", int64(len(probeContent))+1)
	if err == nil && string(content) != probeContent {
		err = fmt.Errorf("%w: an overlay shows %q", errors.ErrUnsupported, content)
	}
	return err
}

// judge tells errors of a kernel that can't do it from those that say nothing of it. The image is a good one: a kernel that
// finds it invalid does not know its form.
func judge(err error) error {
	for _, cannot := range []error{unix.ENODEV, unix.ENOSYS, unix.EOPNOTSUPP, unix.ENOTBLK, unix.EINVAL} {
		if errors.Is(err, cannot) && !errors.Is(err, errors.ErrUnsupported) {
			return fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
		}
	}
	return err
}

// unnamed makes a file that goes with its descriptor.
func unnamed(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file: %w", err)
	}
	return os.NewFile(uintptr(fd), "probe"), nil
}

func pathOf(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// writeProbe writes the image and the data file.
func writeProbe(image, data *os.File) error {
	root := tree.NewDir()
	root.Children["file"] = &tree.Node{Mode: unix.S_IFREG | 0o644, Data: tree.Data{Size: int64(len(probeContent))}}
	if _, err := data.Write(append([]byte(probeContent), make([]byte, tree.BlockSize-len(probeContent))...)); err != nil {
		return fmt.Errorf("write a data file: %w", err)
	}
	_, err := Write(image, root, []int64{1})
	return err
}
