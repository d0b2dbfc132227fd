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

// probeContent is the content of the probe's only file.
const probeContent = "berth"

// Probe checks whether images in dir can be used as layers. It creates one there, mounts it from
// its file, puts an overlay on it and reads a file. The files have no names and the mounts are
// detached, so nothing is left behind. The kernel must mount EROFS from files (Linux 6.12) on dir's
// filesystem (not a tmpfs), and put an overlay on a detached mount (Linux 6.15). Otherwise the
// error is errors.ErrUnsupported. Any other error is a lack of space, descriptors or memory. Then
// the support is unknown.
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
	defer image.Close() // which deletes the file
	data, err := unnamed(dir)
	if err != nil {
		return err
	}
	defer data.Close()
	if err := writeProbe(image, data); err != nil {
		return err
	}
	// A read-only overlay needs two different layers.
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

// judge adds errors.ErrUnsupported to the errors of a kernel without support. The image is valid,
// so a kernel that rejects it does not support its format.
func judge(err error) error {
	for _, cannot := range []error{unix.ENODEV, unix.ENOSYS, unix.EOPNOTSUPP, unix.ENOTBLK, unix.EINVAL} {
		if errors.Is(err, cannot) && !errors.Is(err, errors.ErrUnsupported) {
			return fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
		}
	}
	return err
}

// unnamed creates a file without a name, which the kernel deletes when it is closed.
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
