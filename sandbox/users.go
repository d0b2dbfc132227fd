package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/oci"
)

// What is kept in memory of images' user files: of so many images, of files up to
// that size. Larger ones are read each time.
const (
	maxUserFiles     = 64
	maxUserFileBytes = 64 << 10
)

// userFiles remembers /etc/passwd and /etc/group of images: containers of one
// image start again and again. An image's ID names its content, so entries never
// become wrong. The lock guards the map and is held for map operations only.
type userFiles struct {
	mu sync.Mutex
	by map[string]userFilesOf
}

type userFilesOf struct{ passwd, group []byte }

func (u *userFiles) get(imageID string) (userFilesOf, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	files, ok := u.by[imageID]
	return files, ok
}

func (u *userFiles) put(imageID string, files userFilesOf) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(files.passwd)+len(files.group) > maxUserFileBytes {
		return
	}
	if u.by == nil {
		u.by = map[string]userFilesOf{}
	}
	if len(u.by) >= maxUserFiles {
		for id := range u.by { // any: map order is as good as another here
			delete(u.by, id)
			break
		}
	}
	u.by[imageID] = files
}

// resolveUser finds out who a container runs as. The root filesystem is the
// image's, held by the caller.
func (m *Manager) resolveUser(config *runtimeapi.ContainerConfig, image imageRecord, root rootfs.Spec) (oci.User, error) {
	files, err := m.userFilesOf(image.ID, root)
	if err != nil {
		return oci.User{}, err
	}
	request := oci.ContainerUserRequest(config.GetLinux().GetSecurityContext(), image.Config.User)
	return oci.ResolveUser(files.passwd, files.group, request)
}

// userFilesOf reads the files through a mount that is in no mount namespace, as
// a container would see them, links between layers included.
func (m *Manager) userFilesOf(imageID string, root rootfs.Spec) (userFilesOf, error) {
	if files, ok := m.users.get(imageID); ok {
		return files, nil
	}
	root.Upper, root.Work, root.IDMap = "", "", nil
	mount, err := root.Mount()
	if err != nil {
		return userFilesOf{}, fmt.Errorf("look into image %s: %w", imageID, err)
	}
	defer mount.Close() // takes the mount away
	var files userFilesOf
	if files.passwd, err = readUserFile(mount, "/etc/passwd"); err != nil {
		return userFilesOf{}, fmt.Errorf("image %s: %w", imageID, err)
	}
	if files.group, err = readUserFile(mount, "/etc/group"); err != nil {
		return userFilesOf{}, fmt.Errorf("image %s: %w", imageID, err)
	}
	m.users.put(imageID, files)
	return files, nil
}

// readUserFile returns nil for a file the image does not have.
func readUserFile(root *os.File, path string) ([]byte, error) {
	data, err := safefs.ReadFile(root, path, oci.MaxUserFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if isImagesFault(err) {
		return nil, errdefs.InvalidArgument("read %s of the image: %w", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s of the image: %w", path, err)
	}
	return data, nil
}

// isImagesFault tells whether a file cannot be read because of what the image has
// in its place: no file, too large a one, links that lead round and round, a file where
// a directory should be.
func isImagesFault(err error) bool {
	return errors.Is(err, safefs.ErrNotRegular) || errors.Is(err, safefs.ErrTooLarge) || errdefs.IsBadPath(err)
}
