package runtime

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/oci/users"
)

// Limits of the cache of images' user files: the number of images, and the size of a file. Larger
// files are read each time.
const (
	maxUserFiles     = 64
	maxUserFileBytes = 64 << 10
)

// Users caches /etc/passwd and /etc/group of images, because many containers start from the same
// image. Entries never become stale, because an image's ID identifies its content. That is proven
// only for complete layers, so the files of an incomplete image are not cached. The zero value is
// ready to use. The lock guards the map and is held for map operations only.
type Users struct {
	mu sync.Mutex
	// +checklocks:mu
	by map[string]UserFiles
}

// UserFiles are the contents of an image's /etc/passwd and /etc/group. A missing file is nil.
type UserFiles struct{ Passwd, Group []byte }

func (u *Users) get(imageID string) (UserFiles, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	files, ok := u.by[imageID]
	return files, ok
}

func (u *Users) put(imageID string, files UserFiles) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(files.Passwd)+len(files.Group) > maxUserFileBytes {
		return
	}
	if u.by == nil {
		u.by = map[string]UserFiles{}
	}
	if len(u.by) >= maxUserFiles {
		for id := range u.by { // an arbitrary entry
			delete(u.by, id)
			break
		}
	}
	u.by[imageID] = files
}

// Of returns the user files of the image with that ID and the layers of root.
func (u *Users) Of(imageID string, root rootfs.Spec) (UserFiles, error) {
	if files, ok := u.get(imageID); ok {
		return files, nil
	}
	root.Upper, root.Work, root.IDMap = "", "", nil
	mount, err := root.Mount()
	if err != nil {
		return UserFiles{}, fmt.Errorf("mount image %s: %w", imageID, err)
	}
	defer mount.Close() // unmounts
	var files UserFiles
	if files.Passwd, err = readUserFile(mount, "/etc/passwd"); err != nil {
		return UserFiles{}, fmt.Errorf("user files of image %s: %w", imageID, err)
	}
	if files.Group, err = readUserFile(mount, "/etc/group"); err != nil {
		return UserFiles{}, fmt.Errorf("user files of image %s: %w", imageID, err)
	}
	if root.Keep == nil { // otherwise a layer's table of contents may be wrong
		u.put(imageID, files)
	}
	return files, nil
}

// readUserFile returns nil for a missing file.
func readUserFile(root *os.File, path string) ([]byte, error) {
	data, err := safefs.ReadFile(root, path, users.MaxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if isImageFault(err) {
		return nil, errdefs.InvalidArgument("read %s of the image: %w", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s of the image: %w", path, err)
	}
	return data, nil
}

// isImageFault reports whether the image makes a file unreadable. The file may be missing or too
// large, its links may loop, or a directory may be a file.
func isImageFault(err error) bool {
	return errors.Is(err, safefs.ErrNotRegular) || errors.Is(err, safefs.ErrTooLarge) || errdefs.IsBadPath(err)
}
