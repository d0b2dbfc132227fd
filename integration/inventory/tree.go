package inventory

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/integration/machine"
)

// Tree describes all files of a directory: one line for each path.
type Tree map[string]string

// ReadTree reads the tree at root, including the content of every file.
func ReadTree(root string) (Tree, error) {
	found, names := Tree{}, fileNames{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, root)
		found[name], err = describe(path, name, names)
		return err
	})
	return found, err
}

// Difference returns the differences of two trees.
func (t Tree) Difference(want Tree) (diff []string) {
	for _, path := range slices.Sorted(maps.Keys(want)) {
		if t[path] != want[path] {
			diff = append(diff, fmt.Sprintf("%q is %q, want %q", path, t[path], want[path]))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(t)) {
		if _, ok := want[path]; !ok {
			diff = append(diff, fmt.Sprintf("%q is %q, want no such file", path, t[path]))
		}
	}
	return Summary(diff)
}

// fileNames maps each inode to the first name that was seen, except for directories.
type fileNames map[inode]string

type inode struct{ device, number uint64 }

// another returns the name under which the file was seen before, or "".
func (n fileNames) another(name string, st *unix.Stat_t) string {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return ""
	}
	id := inode{st.Dev, st.Ino}
	first, ok := n[id]
	if !ok {
		n[id] = name
	}
	return first
}

// describe describes a file of a layer or join completely. Names below "/fs" belong to the image.
func describe(path, name string, names fileNames) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if first := names.another(name, &st); first != "" {
		return "hard link to " + first, nil
	}
	content, err := insideOf(path, &st)
	return fmt.Sprintf("mode %o owner %d:%d %s%s", st.Mode, st.Uid, st.Gid, modified(name, &st), content), err
}

// modified returns the mtime of a file that comes from the image. Whiteouts and files beside the
// tree have other mtimes.
func modified(name string, st *unix.Stat_t) string {
	whiteout := st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
	if whiteout || name != "/fs" && !strings.HasPrefix(name, "/fs/") {
		return ""
	}
	return fmt.Sprintf("time %d.%d ", st.Mtim.Sec, st.Mtim.Nsec)
}

// insideOf describes a file by the checksum of its content and by its extended attributes.
func insideOf(path string, st *unix.Stat_t) (string, error) {
	content, err := describeContent(path, st)
	if err != nil {
		return "", err
	}
	attributes, err := extendedAttributes(path)
	return content + attributes, err
}

func describeContent(path string, st *unix.Stat_t) (string, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		f, err := os.Open(path)
		if err != nil {
			return "", err
		}
		defer f.Close()
		h := sha256.New()
		n, err := io.Copy(h, f)
		return fmt.Sprintf("%d bytes %s", n, hex.EncodeToString(h.Sum(nil))), err
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		return "-> " + target, err
	}
	return fmt.Sprintf("device %d", st.Rdev), nil
}

// ofThisDirectory lists overlayfs attributes that name an inode, which differs in each run.
var ofThisDirectory = []string{"trusted.overlay.origin", "trusted.overlay.upper", "trusted.overlay.uuid"}

func extendedAttributes(path string) (string, error) {
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil
	}
	if err != nil {
		return "", &os.PathError{Op: "llistxattr", Path: path, Err: err}
	}
	var all []string
	for _, name := range strings.Split(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := machine.Lgetxattr(path, name, value)
		if err != nil {
			return "", err
		}
		if slices.Contains(ofThisDirectory, name) {
			n = 0
		}
		all = append(all, fmt.Sprintf(" %s=%x", name, value[:n]))
	}
	slices.Sort(all)
	return strings.Join(all, ""), nil
}
