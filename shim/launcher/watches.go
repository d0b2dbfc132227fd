package launcher

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// inode identifies a file of a filesystem.
type inode struct{ dev, ino uint64 }

// maxWatchWalk limits the entries of a root filesystem that addWatches looks at.
const maxWatchWalk = 1 << 20

// addWatches names the files of the root filesystem that processes watch with inotify. The kernel
// identifies them by inode. CRIU needs their paths, and an overlay filesystem cannot open files by
// handle. So berth looks for the inodes before the freeze. Watched files that have no path are left
// to CRIU, which refuses them.
func (d *dump) addWatches() error {
	wanted := map[inode]bool{}
	for _, pid := range d.pids {
		err := collectWatches(pid, wanted)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH) { // it has ended
			return err
		}
	}
	if len(wanted) == 0 {
		return nil
	}
	root, err := safefs.OpenRoot(fmt.Sprintf("/proc/%d/root/", d.state.InitProcessPid))
	if err != nil {
		return fmt.Errorf("look for watched files: %w", err)
	}
	defer root.Close() // it was only read
	paths, err := findInodes(root, wanted)
	if err != nil {
		return fmt.Errorf("look for watched files: %w", err)
	}
	d.opts.IrmapScanPaths = paths
	return nil
}

// collectWatches adds the files that a process watches.
func collectWatches(pid int, to map[inode]bool) error {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if target, err := os.Readlink(dir + "/" + e.Name()); err != nil || target != "anon_inode:inotify" {
			continue // another kind, or closed
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, e.Name()))
		if err != nil {
			continue // it was closed
		}
		parseWatches(string(info), to)
	}
	return nil
}

// parseWatches adds the watches in the fdinfo of an inotify descriptor (proc(5)).
func parseWatches(info string, to map[inode]bool) {
	for line := range strings.Lines(info) {
		var wd, ino, dev uint64
		if _, err := fmt.Sscanf(line, "inotify wd:%x ino:%x sdev:%x", &wd, &ino, &dev); err == nil {
			const minorBits = 20 // the kernel's own form of a device number
			to[inode{unix.Mkdev(uint32(dev>>minorBits), uint32(dev&(1<<minorBits-1))), ino}] = true
		}
	}
}

// findInodes returns the paths of inodes in the filesystem of root, without those in other mounts.
// The longest path comes first, because CRIU searches the whole tree below a path before it tries
// the next path.
func findInodes(root *os.File, wanted map[inode]bool) (paths []string, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return nil, os.NewSyscallError("fstat", err)
	}
	if wanted[inode{st.Dev, st.Ino}] {
		paths = append(paths, "/")
	}
	elsewhere := func(i inode) bool { return i.dev == st.Dev && i.ino != st.Ino }
	if !slices.ContainsFunc(slices.Collect(maps.Keys(wanted)), elsewhere) {
		return paths, nil
	}
	walk, err := safefs.NewWalk(root, true)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, walk.Close()) }()
	for range maxWatchWalk {
		entry, err := walk.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		st, err := entry.Stat()
		if err != nil || !wanted[inode{st.Dev, st.Ino}] {
			continue // vanished, or not watched
		}
		if p, err := pathOf(root, entry); err == nil {
			paths = append(paths, p)
		}
	}
	slices.SortFunc(paths, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a, b)) })
	return paths, nil
}

// pathOf returns the path of an entry below root.
func pathOf(root *os.File, entry safefs.Entry) (string, error) {
	f, err := entry.Open()
	if err != nil {
		return "", err
	}
	defer f.Close() // it was only looked at
	return pathBelow(int(root.Fd()), int(f.Fd()))
}
