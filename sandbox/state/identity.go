package state

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/checkpoint/record"
	"berth/internal/host"
	"berth/internal/safefs"
)

// Identity names a root directory. Root has it in a file, and so has the state directory that is
// used with that root. They differ if root is empty, not mounted, or another node's. Earlier
// versions ignore both files.
type Identity struct {
	ID string `json:"id"` // random; of the root directory

	// In the file of root:
	State string `json:"state,omitempty"` // the state directory

	// In the file of the state directory:
	Root   string `json:"root,omitempty"`
	Inode  uint64 `json:"inode,omitempty"`  // of the file in root; a copy of root has another inode
	Mount  string `json:"mount,omitempty"`  // where the filesystem of root is mounted
	Device string `json:"device,omitempty"` // of that mount
}

// maxIdentity bounds the size of an identity file in bytes. It has at most three paths.
const maxIdentity = 32 << 10

func identityFile(dir string) string { return filepath.Join(dir, "identity") }

// ReadIdentity reads the identity in root or a state directory. If there is no valid file, it is
// empty.
func ReadIdentity(dir string) (Identity, error) {
	data, err := safefs.ReadHostFile(identityFile(dir), maxIdentity)
	if errors.Is(err, fs.ErrNotExist) {
		return Identity{}, nil
	}
	if err != nil {
		return Identity{}, fmt.Errorf("read the identity of %s: %w", dir, err)
	}
	var i Identity
	if json.Unmarshal(data, &i) != nil { // a file that a power cut has damaged counts as missing
		return Identity{}, nil
	}
	return i, nil
}

// InodeOf returns the inode of the identity file in root, or 0 if there is none.
func InodeOf(root string) (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat(identityFile(root), &st)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("stat the identity of %s: %w", root, err)
	}
	return st.Ino, nil
}

// Identify gives root an identity, unless it has one, and writes the identity to the state
// directory. Both directories exist.
func (d Dirs) Identify() error {
	own, err := ReadIdentity(d.Root)
	if err != nil {
		return err
	}
	if own.ID == "" || own.State != d.State {
		own = Identity{ID: own.ID, State: d.State}
		if own.ID == "" {
			own.ID = rand.Text()
		}
		if err := writeIdentity(d.Root, own); err != nil {
			return err
		}
	}
	known, err := ReadIdentity(d.State)
	if err != nil {
		return err
	}
	inode, err := InodeOf(d.Root)
	if err != nil {
		return err
	}
	if known.ID == own.ID && known.Root == d.Root && known.Inode == inode {
		return nil
	}
	known = Identity{ID: own.ID, Root: d.Root, Inode: inode}
	if mount, err := host.MountOf(d.Root); err == nil { // otherwise messages do not name the mount, because in a chroot no mount may be visible
		known.Mount, known.Device = mount.Mountpoint, mount.Source
	}
	return writeIdentity(d.State, known)
}

func writeIdentity(dir string, i Identity) error {
	data, err := json.Marshal(i)
	if err == nil {
		err = replaceFile(identityFile(dir), append(data, '\n'))
	}
	if err != nil {
		return fmt.Errorf("write the identity of %s: %w", dir, err)
	}
	return nil
}

// Recorded returns the IDs of all pods and containers that have records below root. The records may
// be damaged or set aside. changed is the time when a record was last written or removed. It is
// zero if a folder of records is missing, because no daemon has used root or the folder was
// removed.
func Recorded(root string) (ids map[string]bool, changed time.Time, err error) {
	ids = map[string]bool{}
	complete := true
	for _, folder := range recordFolders {
		for _, dir := range []string{folder, filepath.Join(folder, record.SetAsideDir)} {
			path := filepath.Join(root, dir)
			entries, err := os.ReadDir(path)
			if errors.Is(err, fs.ErrNotExist) {
				complete = complete && dir != folder
				continue
			}
			if err != nil {
				return nil, changed, fmt.Errorf("list the records below %s: %w", root, err)
			}
			for _, e := range entries {
				if id, _, _ := strings.Cut(e.Name(), "."); IsID(id) {
					ids[id] = true
				}
			}
			info, err := os.Stat(path)
			if err != nil {
				return nil, changed, fmt.Errorf("stat the records below %s: %w", root, err)
			}
			if info.ModTime().After(changed) {
				changed = info.ModTime()
			}
		}
	}
	if !complete {
		changed = time.Time{}
	}
	return ids, changed, nil
}

// recordFolders are the folders of the records of pods and containers.
var recordFolders = []string{"pods", "containers"}
