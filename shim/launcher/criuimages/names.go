package criuimages

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"berth/internal/safefs"
)

// names checks the names of a checkpoint: what CRIU would find below the container's root.
type names struct {
	root  *os.File
	proc  map[string]bool // mount points except /; true: of a proc filesystem
	plain map[string]bool // paths on the root filesystem that are no symbolic links
	links bool            // a socket's name has a symbolic link on the root filesystem
}

// maxLinks limits the symbolic links of a name, as the kernel does.
const maxLinks = 40

// refusedName refuses a name of the kind of a file.
func refusedName(kind, name, reason string) error {
	return &Refused{fmt.Sprintf("the %s %q cannot be restored: %s", kind, name, reason)}
}

// rootedName is the path below the container's root that CRIU opens for a name: it leaves the first
// byte out.
func rootedName(name []byte) string { return "/" + string(name[min(1, len(name)):]) }

// checkRegular checks the entry of a file with a path. CRIU makes a deleted one again.
func (n *names) checkRegular(data []byte, deleted bool, mounts map[uint64][]string) error {
	const flags, name, mount = 2, 6, 7
	r, err := decode(data)
	if err != nil {
		return err
	}
	if deleted {
		return checkFile(n.root, file{string(r.texts[name]), uint64(protowire.DecodeZigZag(r.numbers[mount]))}, mounts)
	}
	if r.numbers[flags]&(unix.O_CREAT|unix.O_EXCL|unix.O_TRUNC) != 0 { // the kernel reports none of them
		return refusedName("file", string(r.texts[name]), "its flags make or empty a file")
	}
	return n.check("file", rootedName(r.texts[name]), false, r.numbers[flags]&unix.O_NOFOLLOW != 0)
}

// checkSocket checks the entry of a unix socket. The kernel keeps its name as a process has passed
// it, relative to the process's working directory.
func (n *names) checkSocket(data []byte) error {
	const name, dir = 11, 14
	s, err := decode(data)
	if err != nil {
		return err
	}
	at, _, _ := bytes.Cut(s.texts[name], []byte{0})
	if len(at) == 0 {
		return nil // without a path
	}
	full := string(at)
	if full[0] != '/' {
		full = "/" + string(s.texts[dir]) + "/" + full
	}
	return n.check("socket", full, true, false)
}

// checkWatches checks the entry of an inotify descriptor.
func (n *names) checkWatches(data []byte) error {
	const watches, handle, name = 5, 7, 4
	return eachOf(data, watches, func(watch []byte) error {
		w, err := decode(watch)
		if err != nil {
			return err
		}
		h, err := decode(w.messages[handle])
		if err != nil || len(h.texts[name]) == 0 {
			return err
		}
		return n.check("watched file", rootedName(h.texts[name]), false, false)
	})
}

// check refuses a name that has a symbolic link, unless the mount with the link follows none
// (WithoutLinks). With follow it permits links of the root filesystem, and checks where they lead.
// With last the name itself may be a link.
func (n *names) check(kind, name string, follow, last bool) error {
	if len(name) > unix.PathMax || strings.ContainsRune(name, 0) {
		return refusedName(kind, name[:min(len(name), 100)], "it is not a path")
	}
	at, links := "/", 0
	rest := strings.Split(name, "/")
	for len(rest) > 0 {
		element := rest[0]
		rest = rest[1:]
		next := path.Join(at, element)
		isProc, mounted := n.mountAt(next)
		switch {
		case element == "..", element == "", element == ".":
		case isProc && isProcLink(next):
			return refusedName(kind, name, next+" is a symbolic link of a proc filesystem")
		case !mounted:
			target, err := n.readlink(next)
			if err != nil {
				return fmt.Errorf("check the %s %q: %w", kind, name, err)
			}
			if target == "" || last && len(rest) == 0 {
				break
			}
			if links++; !follow || links > maxLinks {
				return refusedName(kind, name, next+" is a symbolic link")
			}
			n.links = true
			rest = append(strings.Split(target, "/"), rest...)
			next = at
			if path.IsAbs(target) {
				next = "/"
			}
		}
		at = next
	}
	return nil
}

// mountAt returns whether a path is at or below a mount point, and whether the deepest is a proc
// filesystem.
func (n *names) mountAt(p string) (isProc, mounted bool) {
	for ; p != "/"; p = path.Dir(p) {
		if isProc, mounted = n.proc[p]; mounted {
			return isProc, true
		}
	}
	return false, false
}

// readlink returns the target of a symbolic link on the root filesystem; "" for anything else. The
// directories above it are no links.
func (n *names) readlink(p string) (string, error) {
	if n.plain[p] {
		return "", nil
	}
	dir, err := safefs.OpenDir(n.root, path.Dir(p))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer dir.Close() // it was only read
	st, err := dir.Stat(path.Base(p))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return dir.Readlink(path.Base(p))
	}
	n.plain[p] = true
	return "", nil
}

// isProcLink returns whether a path in a proc filesystem may be a symbolic link. The links of a
// process lead to any of its files.
func isProcLink(p string) bool {
	dir, name := path.Split(p)
	parent := path.Base(dir)
	_, err := strconv.Atoi(parent)
	return name == "self" || name == "thread-self" || err == nil && slices.Contains([]string{"cwd", "root", "exe"}, name) ||
		slices.Contains([]string{"fd", "map_files", "ns"}, parent)
}
