package layer

import (
	"errors"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/internal/safefs"
)

const (
	maxViewLinks = 40 // symlinks in one resolution, the kernel's own limit
	namesPerStep = 16 // path names that can be copied in the time of a step
)

// view shows stacked directory layers as overlayfs would. Unlike a mount it reports the layers of a
// file.
type view struct {
	effort *Effort
	roots  []*os.File // topmost first
	root   found
	seen   map[string]found // by path, no more than maxSeen
	size   int              // of seen
}

// maxSeen limits the cache of a view, in words of memory.
const maxSeen = 1 << 20

// found is a file or directory in a view.
type found struct {
	path   string      // without symlinks
	layers []int       // the layer of a file, or the merged layers of a directory, topmost first
	st     unix.Stat_t // in the first of these layers
}

func (f found) isDir() bool { return f.st.Mode&unix.S_IFMT == unix.S_IFDIR }

// openView opens the trees of layers, topmost first. close closes them.
func openView(effort *Effort, trees []string) (*view, error) {
	v := &view{effort: effort, seen: map[string]found{}, root: found{st: unix.Stat_t{Mode: unix.S_IFDIR}}}
	for i, tree := range trees {
		f, err := safefs.OpenRoot(tree)
		if err != nil {
			v.close()
			return nil, err
		}
		v.roots = append(v.roots, f)
		v.root.layers = append(v.root.layers, i)
	}
	return v, nil
}

func (v *view) close() {
	for _, f := range v.roots {
		f.Close() // O_PATH
	}
}

// without returns the view of the layers below the topmost one. It shares the open files.
func (v *view) without() *view {
	w := &view{effort: v.effort, roots: v.roots, root: v.root, seen: map[string]found{}}
	w.root.layers = v.root.layers[1:]
	return w
}

// open opens a directory in one layer.
func (v *view) open(layer int, dir string) (*safefs.Dir, error) {
	if err := v.effort.open(dir); err != nil {
		return nil, err
	}
	return safefs.OpenDir(v.roots[layer], dir)
}

// directory returns a directory. The path has no symlinks.
func (v *view) directory(p string) (found, error) {
	if p == "" {
		return v.root, nil
	}
	f, ok := v.seen[p]
	if !ok {
		dir, base := safefs.Split(p)
		parent, err := v.directory(dir)
		if err != nil {
			return found{}, err
		}
		if f, err = v.child(parent, base); err != nil {
			return found{}, err
		}
	}
	if !f.isDir() {
		return found{}, unix.ENOTDIR
	}
	return f, nil
}

// child looks up a name in a directory of the view, or returns ENOENT.
func (v *view) child(dir found, name string) (found, error) {
	if err := v.effort.step(); err != nil {
		return found{}, err
	}
	p := safefs.Join(dir.path, name)
	if f, ok := v.seen[p]; ok {
		return f, nil
	}
	f, err := v.lookUp(dir, name)
	if err == nil {
		v.remember(f)
	}
	return f, err
}

// remember caches f. A full cache is cleared first.
func (v *view) remember(f found) {
	const words = 32 // of a found and its map entry
	size := words + len(f.path)/8 + len(f.layers)
	if v.size += size; v.size > maxSeen {
		clear(v.seen)
		v.size = size
	}
	v.seen[f.path] = f
}

// lookUp looks up a name in the layers of a directory.
func (v *view) lookUp(dir found, name string) (found, error) {
	f := found{path: safefs.Join(dir.path, name)}
	for _, layer := range dir.layers {
		st, opaque, err := v.look(layer, dir.path, name)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return found{}, err
		}
		isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
		if unpack.IsWhiteout(&st) || !isDir && len(f.layers) > 0 {
			break
		}
		if len(f.layers) == 0 {
			f.st = st
		}
		if f.layers = append(f.layers, layer); !isDir || opaque {
			break
		}
	}
	if len(f.layers) == 0 {
		return found{}, unix.ENOENT
	}
	return f, nil
}

// look returns the status of a name in one layer, and whether it is an opaque directory.
func (v *view) look(layer int, dir, name string) (st unix.Stat_t, opaque bool, err error) {
	d, err := v.open(layer, dir)
	if err != nil {
		return st, false, err
	}
	defer d.Close()
	if st, err = d.Stat(name); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return st, false, err
	}
	value, err := d.Getxattr(name, unpack.OpaqueXattr)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	return st, string(value) == "y", err
}

// resolve finds a path as a process in the root would. It follows symlinks except at the end.
func (v *view) resolve(p string) (found, error) {
	trail := []found{v.root}
	rest := strings.Split(p, "/")
	for links := 0; len(rest) > 0; {
		cur, name := trail[len(trail)-1], rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			trail = trail[:max(len(trail)-1, 1)]
			continue
		}
		if !cur.isDir() {
			return found{}, unix.ENOTDIR
		}
		next, err := v.child(cur, name)
		if err != nil {
			return found{}, err
		}
		if next.st.Mode&unix.S_IFMT != unix.S_IFLNK || len(rest) == 0 {
			trail = append(trail, next)
			continue
		}
		if links++; links > maxViewLinks {
			return found{}, unix.ELOOP
		}
		target, err := v.readlink(next)
		if err != nil {
			return found{}, err
		}
		if path.IsAbs(target) {
			trail = trail[:1]
		}
		rest = slices.Concat(strings.Split(target, "/"), rest)
		// All names cost effort, even if they are never reached.
		if err := v.effort.pay(stepEffort * int64(len(rest)) / namesPerStep); err != nil {
			return found{}, err
		}
	}
	return trail[len(trail)-1], nil
}

func (v *view) readlink(f found) (string, error) {
	dir, base := safefs.Split(f.path)
	d, err := v.open(f.layers[0], dir)
	if err != nil {
		return "", err
	}
	defer d.Close()
	return d.Readlink(base)
}
