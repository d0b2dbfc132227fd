package powercut

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/integration/harness"
	"berth/integration/machine"
)

// tree is everything that can be seen of a directory's files: a line for each path.
type tree map[string]string

// readTree reads the tree at root, the content of every file included.
func readTree(root string) (tree, error) {
	found, names := tree{}, map[uint64]string{}
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

// describe tells everything about a file. names has the first name of each inode.
func describe(path, name string, names map[uint64]string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return "", &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if first, ok := names[st.Ino]; ok {
			return "another name of " + first, nil
		}
		names[st.Ino] = name
	}
	content, err := describeContent(path, &st)
	if err != nil {
		return "", err
	}
	attributes, err := extendedAttributes(path)
	return fmt.Sprintf("mode %o owner %d:%d %s%s%s", st.Mode, st.Uid, st.Gid, modified(name, &st), content, attributes), err
}

// modified tells a file's mtime, where that is the image's: it is not in whiteouts and what is beside the tree.
func modified(name string, st *unix.Stat_t) string {
	whiteout := st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
	if whiteout || name != "/fs" && !strings.HasPrefix(name, "/fs/") {
		return ""
	}
	return fmt.Sprintf("time %d.%d ", st.Mtim.Sec, st.Mtim.Nsec)
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

func extendedAttributes(path string) (string, error) {
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
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
		all = append(all, fmt.Sprintf(" %s=%x", name, value[:n]))
	}
	slices.Sort(all)
	return strings.Join(all, ""), nil
}

// difference names what two trees differ in.
func (t tree) difference(want tree) (diff []string) {
	for _, path := range slices.Sorted(maps.Keys(want)) {
		if t[path] != want[path] {
			diff = append(diff, fmt.Sprintf("%q is %q, want %q", path, t[path], want[path]))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(t)) {
		if _, ok := want[path]; !ok {
			diff = append(diff, fmt.Sprintf("%q is %q, and should not be", path, t[path]))
		}
	}
	return harness.Summary(diff)
}

// readLayers reads the layers and joins of an image store, by their path in it.
func readLayers(t *testing.T, store string) map[string]tree {
	t.Helper()
	layers := map[string]tree{}
	for _, kind := range []string{"layers", "joins"} {
		for _, name := range machine.ReadDir(filepath.Join(store, kind)) {
			found, err := readTree(filepath.Join(store, kind, name))
			harness.Must(t, err)
			layers[filepath.Join(kind, name)] = found
		}
	}
	return layers
}
