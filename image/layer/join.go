package layer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/internal/diskusage"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// Join implements Joiner. The join is mounted right above top. It contains
//
//   - the hard links of top whose target is in a layer below, as further names of that file. Layers
//     share a filesystem and never change, so nothing is copied, and inode numbers are equal;
//   - the directories that top's tar does not list, if a layer below gives them other attributes
//     than 0755 root:root. overlayfs shows the attributes of the topmost layer, so a layer with
//     only "tmp/x" would drop the sticky bit of /tmp;
//   - the parents of these, with unchanged attributes.
func (d *Directory) Join(effort *Effort, dir string, top Part, below []string) (Usage, bool, error) {
	j := &joiner{effort: effort, made: map[string]bool{}, inherits: map[string]int{}}
	if err := j.open(top, below); err != nil {
		return Usage{}, false, err
	}
	defer j.close()
	for _, name := range top.Contents.Implied {
		if err := j.inherit(string(name), top.Contents.Opaque); err != nil {
			return Usage{}, false, fmt.Errorf("directory %q: %w", name, err)
		}
	}
	if len(j.inherits) == 0 && len(top.Contents.Links) == 0 {
		return Usage{}, false, nil
	}
	if err := j.makeRoot(dir); err != nil {
		return Usage{}, false, err
	}
	if err := j.build(top.Contents.Links); err != nil {
		return Usage{}, false, blame(err)
	}
	return j.usage, true, nil
}

type joiner struct {
	effort   *Effort
	root     *os.File // of the join
	block    int64
	all      *view          // top and the layers below
	below    *view          // the layers below
	inherits map[string]int // directories of top, by the index of the layer below that gives their attributes
	made     map[string]bool
	times    []dirTimes // set last: adding entries changes them
	usage    Usage
}

func (j *joiner) open(top Part, below []string) error {
	trees := []string{filepath.Join(top.Dir, treeDir)}
	for _, b := range slices.Backward(below) {
		trees = append(trees, filepath.Join(b, treeDir))
	}
	var err error
	if j.all, err = openView(j.effort, trees); err != nil {
		return err
	}
	j.below = j.all.without()
	return nil
}

func (j *joiner) makeRoot(dir string) (err error) {
	if j.root, err = makeTree(dir); err != nil {
		return err
	}
	j.block, err = diskusage.BlockSize(j.root)
	return err
}

func (j *joiner) close() {
	j.all.close()
	if j.root != nil {
		j.root.Close() // O_PATH
	}
}

// inherit records which layer below gives the attributes of an implied directory, if they differ
// from the default.
func (j *joiner) inherit(name string, opaque bool) error {
	if opaque && name != "" {
		return nil // top hides everything below except the root itself
	}
	layer, ok, err := j.source(name)
	if err != nil || !ok {
		return err
	}
	same, err := j.sameAttributes(name, layer)
	if err == nil && !same {
		j.inherits[name] = layer
	}
	return err
}

// source returns the topmost layer below that has the directory name of top.
func (j *joiner) source(name string) (layer int, ok bool, err error) {
	if name == "" {
		layers := j.all.root.layers
		return layers[min(1, len(layers)-1)], len(layers) > 1, nil
	}
	dir, base := safefs.Split(name)
	parent, err := j.all.directory(dir)
	if err != nil {
		return 0, false, err
	}
	if parent.layers[0] == 0 {
		parent.layers = parent.layers[1:]
	}
	f, err := j.below.lookUp(parent, base) // child is not used, because the cache of the view below must not contain what top hides
	if errors.Is(err, unix.ENOENT) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	return f.layers[0], f.isDir(), nil
}

func (j *joiner) sameAttributes(name string, layer int) (bool, error) {
	a, err := j.attributes(0, name)
	if err != nil {
		return false, err
	}
	b, err := j.attributes(layer, name)
	if err != nil {
		return false, err
	}
	return a.equal(b), nil
}

// dirAttributes are the attributes that a join copies from a directory.
type dirAttributes struct {
	st     unix.Stat_t
	xattrs map[string]string
}

// equal ignores times, because each added entry changes them.
func (a dirAttributes) equal(b dirAttributes) bool {
	if a.st.Mode != b.st.Mode || a.st.Uid != b.st.Uid || a.st.Gid != b.st.Gid || len(a.xattrs) != len(b.xattrs) {
		return false
	}
	for name, value := range a.xattrs {
		if v, ok := b.xattrs[name]; !ok || v != value {
			return false
		}
	}
	return true
}

func (j *joiner) attributes(layer int, name string) (dirAttributes, error) {
	d, err := j.all.open(layer, name)
	if err != nil {
		return dirAttributes{}, err
	}
	defer d.Close()
	a := dirAttributes{xattrs: map[string]string{}}
	if a.st, err = d.Stat(""); err != nil {
		return a, err
	}
	names, err := d.Listxattr("")
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return a, err
	}
	for _, attr := range names {
		if !unpack.KeepXattr(attr) {
			continue
		}
		value, err := d.Getxattr("", attr)
		if err != nil {
			return a, err
		}
		a.xattrs[attr] = string(value)
	}
	return a, nil
}

func (j *joiner) build(links []unpack.Link) error {
	for name := range j.inherits {
		d, err := j.directory(name)
		if err != nil {
			return fmt.Errorf("directory %q: %w", name, err)
		}
		d.Close() // O_PATH, as below
	}
	for _, l := range links {
		if err := j.link(string(l.Name), string(l.Target)); err != nil {
			return fmt.Errorf("hard link %q to %q: %w", l.Name, l.Target, err)
		}
	}
	for _, t := range j.times {
		if err := j.setTimes(t); err != nil {
			return err
		}
	}
	return nil
}

// directory opens a directory of the join and creates it if needed.
func (j *joiner) directory(name string) (*safefs.Dir, error) {
	if j.made[name] {
		return safefs.OpenDir(j.root, name)
	}
	if name != "" {
		dir, base := safefs.Split(name)
		parent, err := j.directory(dir)
		if err != nil {
			return nil, err
		}
		defer parent.Close()
		failpoint.Reach("join.make-directory")
		if err := parent.Mkdir(base, 0o755); err != nil {
			return nil, err
		}
		failpoint.Reach("join.directory-made")
	}
	d, err := safefs.OpenDir(j.root, name)
	if err != nil {
		return nil, err
	}
	if err := j.setAttributes(d); err != nil {
		d.Close()
		return nil, err
	}
	j.made[name] = true
	j.usage.Inodes++
	j.usage.Bytes += uint64(j.block)
	return d, nil
}

// setAttributes sets the attributes of a directory of the join. A directory has the attributes that
// it inherits, or else the attributes that it has in top.
func (j *joiner) setAttributes(d *safefs.Dir) error {
	a, err := j.attributes(j.inherits[d.Path()], d.Path()) // 0 is top
	if err != nil {
		return err
	}
	failpoint.Reach("join.set-attributes")
	if err := d.Chown("", a.st.Uid, a.st.Gid); err != nil {
		return err
	}
	failpoint.Reach("join.owner-set")
	for attr, value := range a.xattrs {
		if err := d.Setxattr("", attr, []byte(value)); err != nil {
			return err
		}
		failpoint.Reach("join.attribute-set")
	}
	j.times = append(j.times, dirTimes{d.Path(), a.st.Atim, a.st.Mtim})
	if err := d.Chmod(a.st.Mode & unpack.ModeBits); err != nil {
		return err
	}
	failpoint.Reach("join.attributes-set")
	return nil
}

// dirTimes are the times to set on a directory of the join.
type dirTimes struct {
	name         string
	atime, mtime unix.Timespec
}

func (j *joiner) setTimes(t dirTimes) error {
	d, err := safefs.OpenDir(j.root, t.name)
	if err != nil {
		return err
	}
	failpoint.Reach("join.set-times")
	err = errors.Join(d.Utimes("", t.atime, t.mtime), d.Close())
	failpoint.Reach("join.times-set")
	return err
}

// link creates a hard link to a file of a layer below. If none has the file, it searches all
// layers. The path may lead through a symlink of top, or the tar may list the link before its
// target.
func (j *joiner) link(name, target string) error {
	f, err := j.below.resolve(target)
	if err != nil {
		f, err = j.all.resolve(target)
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return errdefs.InvalidArgument("the layer and those below it have no such file")
	}
	if err != nil {
		return err
	}
	if f.isDir() {
		return errdefs.InvalidArgument("it is a directory")
	}
	return j.linkTo(f, name)
}

func (j *joiner) linkTo(f found, name string) error {
	dir, base := safefs.Split(f.path)
	from, err := j.all.open(f.layers[0], dir)
	if err != nil {
		return err
	}
	defer from.Close()
	dir, newBase := safefs.Split(name)
	to, err := j.directory(dir)
	if err != nil {
		return err
	}
	defer to.Close()
	failpoint.Reach("join.link")
	if err := to.Link(from, base, newBase); err != nil {
		return err
	}
	failpoint.Reach("join.linked")
	return nil
}
