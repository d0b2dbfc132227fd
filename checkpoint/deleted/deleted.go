// Package deleted checks where CRIU would create deleted files again.
//
// # Contract
//
// A process may hold a file open that has no name any more. CRIU stores such a file in its images
// ("ghost"). Before a restore it creates the file as root, beside its old path, and follows symbolic
// links in that path. The container chose the path and, with its writable layer, the links. So the
// checkpoint of this node's own container can lead CRIU out of the container, too.
//
// Check refuses images with such a path unless CRIU's view of it has no symbolic link: the file is on
// the container's root filesystem, below directories without links, or directly in /dev/shm. Other
// mounts, and directories in /dev/shm, are shared with processes that could change them meanwhile.
//
// The package decodes three fields of each message itself. A launcher uses it, and CRIU's generated
// types would make the start of each launcher slower. It reads regular files of one directory, within
// limits.
package deleted

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// Refused is the error for a path that CRIU must not use.
type Refused struct {
	Path   string
	Reason string
}

func (e *Refused) Error() string {
	return fmt.Sprintf("the deleted file %q cannot be restored: %s", e.Path, e.Reason)
}

// Check checks the deleted files of the CRIU images in the directory images. root is the mounted root
// filesystem of the container, which must not change before CRIU uses it. The error is a Refused for a
// path that CRIU must not use.
func Check(images, root *os.File) error {
	dir, err := safefs.OpenDir(images, "")
	if err != nil {
		return fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer dir.Close() // it was only read
	wanted, err := readRemaps(dir)
	if err != nil || len(wanted) == 0 {
		return err
	}
	files, err := readFiles(dir, wanted)
	if err != nil {
		return err
	}
	mounts, err := readMounts(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		delete(wanted, f.id)
		if err := checkFile(root, f, mounts); err != nil {
			return err
		}
	}
	for id := range wanted {
		return &Refused{fmt.Sprint("file ", id), "the checkpoint has no such file"}
	}
	return nil
}

// checkFile checks the path of one deleted file.
func checkFile(root *os.File, f file, mounts map[uint64][]string) error {
	p := f.path
	if !path.IsAbs(p) || path.Clean(p) != p || strings.ContainsRune(p, 0) || p == "/" {
		return &Refused{p, "the path is not that of a file"}
	}
	if len(mounts[f.mount]) != 1 {
		return &Refused{p, fmt.Sprintf("mount %d is not exactly one mount of the checkpoint", f.mount)}
	}
	switch at := mounts[f.mount][0]; {
	case at == "/":
		return checkDirectory(root, p)
	case at == "/dev/shm" && path.Dir(p) == at:
		return nil
	default:
		return &Refused{p, "it is neither on the root filesystem nor directly in /dev/shm"}
	}
}

// checkDirectory checks the directories above a path. CRIU uses the next one above a missing one.
func checkDirectory(root *os.File, p string) error {
	for above := path.Dir(p); ; above = path.Dir(above) {
		dir, err := safefs.OpenDir(root, above)
		switch {
		case err == nil:
			return dir.Close()
		case errors.Is(err, fs.ErrNotExist) && above != "/":
		case errors.Is(err, unix.ELOOP):
			return &Refused{p, fmt.Sprintf("%s has a symbolic link", above)}
		case errors.Is(err, unix.ENOTDIR):
			return &Refused{p, fmt.Sprintf("%s is not a directory", above)}
		default:
			return fmt.Errorf("check the deleted file %q: %w", p, err)
		}
	}
}
