package runtime

import (
	"fmt"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
)

// CheckSubPath returns InvalidArgument if the path is no directory or regular file of the image. It
// resolves links with the image as the root.
func CheckSubPath(layers rootfs.Spec, path string) error {
	root, err := layers.Mount()
	if err != nil {
		return fmt.Errorf("mount the image: %w", err)
	}
	defer root.Close() // unmounts
	f, err := safefs.Open(root, path, unix.O_PATH, 0)
	if errdefs.IsBadPath(err) {
		return errdefs.InvalidArgument("image_sub_path %.300q does not exist in the image: %w", path, err)
	}
	if err != nil {
		return fmt.Errorf("open image_sub_path %q: %w", path, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fmt.Errorf("stat image_sub_path %q: %w", path, err)
	}
	if !st.IsDir() && !st.Mode().IsRegular() {
		return errdefs.InvalidArgument("image_sub_path %q is neither a directory nor a regular file of the image", path)
	}
	return nil
}
