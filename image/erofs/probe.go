package erofs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/rootfs"
	"berth/internal/safefs"
)

// probeContent is what the probe's only file holds.
const probeContent = "berth"

// Probe finds out whether images can be used as layers: it makes one below dir, mounts it from its file, puts an
// overlay on it and reads a file. The mounts are nowhere, and what is made below dir is removed again. The kernel must mount EROFS
// from files (Linux 6.12), of the filesystem that dir is on (not a tmpfs), and put an overlay on a mount that has no place
// (Linux 6.15); else the error is errors.ErrUnsupported.
func Probe(dir string) (err error) {
	tmp, err := os.MkdirTemp(dir, ".probe-")
	if err != nil {
		return fmt.Errorf("probe EROFS: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	l := rootfs.Layer{Kind: rootfs.EROFS, Path: filepath.Join(tmp, "image"), Data: []string{filepath.Join(tmp, "data")}}
	if err := writeProbe(l); err != nil {
		return fmt.Errorf("probe EROFS: %w", err)
	}
	if l.Mount, err = l.Open(); err != nil {
		return fmt.Errorf("probe EROFS: %w", err)
	}
	defer l.Mount.Close() // read only
	return probeOverlay(l, tmp)
}

// writeProbe writes the image and the data file.
func writeProbe(l rootfs.Layer) error {
	root := tree.NewDir()
	root.Children["file"] = &tree.Node{Mode: unix.S_IFREG | 0o644, Data: tree.Data{Size: int64(len(probeContent))}}
	if err := os.WriteFile(l.Data[0], append([]byte(probeContent), make([]byte, tree.BlockSize-len(probeContent))...), 0o600); err != nil {
		return err
	}
	image, err := os.Create(l.Path)
	if err != nil {
		return err
	}
	_, err = Write(image, root, []int64{1})
	return errors.Join(err, image.Close())
}

func probeOverlay(l rootfs.Layer, tmp string) error {
	spec := rootfs.Spec{Layers: []rootfs.Layer{l}, Upper: filepath.Join(tmp, "upper"), Work: filepath.Join(tmp, "work")}
	if err := spec.MakeUpper(); err != nil {
		return fmt.Errorf("probe EROFS: %w", err)
	}
	mount, err := spec.Mount()
	if err != nil {
		return fmt.Errorf("probe EROFS: %w: %w", errors.ErrUnsupported, err)
	}
	defer mount.Close() // takes the mount away
	if data, err := safefs.ReadFile(mount, "file", int64(len(probeContent))+1); err != nil || string(data) != probeContent {
		return fmt.Errorf("probe EROFS: %w: an overlay shows %q, %w", errors.ErrUnsupported, data, err)
	}
	return nil
}
