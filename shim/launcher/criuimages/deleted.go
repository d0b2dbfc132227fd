package criuimages

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

// Refused is the error for images that CRIU must not restore.
type Refused struct{ Reason string }

func (e *Refused) Error() string { return e.Reason }

// refusedFile refuses the path of a deleted file.
func refusedFile(path, reason string) error {
	return &Refused{fmt.Sprintf("the deleted file %q cannot be restored: %s", path, reason)}
}

// CheckFiles checks the names in the CRIU images in the directory images: those of files, unix
// sockets and watched files, and of deleted files in particular. root is the mounted root
// filesystem of the container, which must not change before CRIU uses it. rootLinks is true if
// names of sockets have symbolic links on it. The error is a Refused for a name that CRIU must not
// use.
func CheckFiles(images, root *os.File) (rootLinks bool, err error) {
	dir, err := safefs.OpenDir(images, "")
	if err != nil {
		return false, fmt.Errorf("open images of a checkpoint: %w", err)
	}
	defer dir.Close() // it was only read
	deleted, err := readRemaps(dir)
	if err != nil {
		return false, err
	}
	mounts, err := readMounts(dir)
	if err != nil {
		return false, err
	}
	n := &names{root: root, proc: map[string]bool{}, plain: map[string]bool{}}
	at := map[uint64][]string{}
	for _, m := range mounts {
		at[m.id] = append(at[m.id], m.at)
		n.proc[m.at] = n.proc[m.at] || m.proc
	}
	err = eachEntry(dir, filesImage, filesMagic, func(f fields) error { return checkEntry(n, f, deleted, at) })
	if err != nil {
		return false, err
	}
	for id := range deleted {
		return false, refusedFile(fmt.Sprint("file ", id), "the checkpoint has no such file")
	}
	return n.links, nil
}

// checkEntry checks an entry of the list of files, and removes it from deleted. mounts are the
// mount points by the mounts' IDs.
func checkEntry(n *names, f fields, deleted map[uint64]bool, mounts map[uint64][]string) error {
	const id, regular, inotify, socket = 2, 3, 13, 16
	if data := f.messages[regular]; data != nil {
		of := uint64(uint32(f.numbers[id]))
		if err := n.checkRegular(data, deleted[of], mounts); err != nil {
			return err
		}
		delete(deleted, of)
	}
	if data := f.messages[inotify]; data != nil {
		if err := n.checkWatches(data); err != nil {
			return err
		}
	}
	if data := f.messages[socket]; data != nil {
		return n.checkSocket(data)
	}
	return nil
}

// checkFile checks the path of one deleted file.
func checkFile(root *os.File, f file, mounts map[uint64][]string) error {
	p := f.path
	if !path.IsAbs(p) || path.Clean(p) != p || strings.ContainsRune(p, 0) || p == "/" {
		return refusedFile(p, "the path is not that of a file")
	}
	if len(mounts[f.mount]) != 1 {
		return refusedFile(p, fmt.Sprintf("mount %d is not exactly one mount of the checkpoint", f.mount))
	}
	switch at := mounts[f.mount][0]; {
	case at == "/":
		return checkDirectory(root, p)
	case at == "/dev/shm" && path.Dir(p) == at:
		return nil
	default:
		return refusedFile(p, "it is neither on the root filesystem nor directly in /dev/shm")
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
			return refusedFile(p, fmt.Sprintf("%s has a symbolic link", above))
		case errors.Is(err, unix.ENOTDIR):
			return refusedFile(p, fmt.Sprintf("%s is not a directory", above))
		default:
			return fmt.Errorf("check the deleted file %q: %w", p, err)
		}
	}
}
