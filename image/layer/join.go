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

// Join implements Driver. The join is mounted right above top. It holds
//
//   - the hard links of top whose target is in a layer below, as further names of
//     the very file there: layers share a filesystem and are never written to, so
//     nothing is copied, and inode numbers are equal as they should be;
//   - the directories that top's tar does not list and that have other attributes
//     in the layers below than the 0755 root:root of top's. overlayfs shows those of the
//     topmost layer: a layer that has only "tmp/x" would take the sticky bit off /tmp;
//   - the directories that lead there, with the attributes they have anyway.
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
	all      *view          // top and what is below
	below    *view          // only what is below
	inherits map[string]int // directories of top that have their attributes from a layer below
	made     map[string]bool
	times    []dirTimes // are set when all is in the directories
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

// inherit finds the layer below that an implied directory has its attributes
// from, if they differ from those it has.
func (j *joiner) inherit(name string, opaque bool) error {
	if opaque && name != "" {
		return nil // top hides everything below, all but the root itself
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

// source returns the topmost layer below that adds to the directory name of top.
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
	f, err := j.below.lookUp(parent, base) // what top hides is not to be remembered of below
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

// dirAttributes are what a join copies of a directory.
type dirAttributes struct {
	st     unix.Stat_t
	xattrs map[string]string
}

// equal leaves the times out: every entry that is added changes them.
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

// build makes the directories and links.
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

// directory opens a directory of the join, which it makes if it is not there.
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
	if err := j.dress(d); err != nil {
		d.Close()
		return nil, err
	}
	j.made[name] = true
	j.usage.Inodes++
	j.usage.Bytes += uint64(j.block)
	return d, nil
}

// dress gives a directory of the join the attributes that are to be seen: those
// it inherits, else those it has in top.
func (j *joiner) dress(d *safefs.Dir) error {
	a, err := j.attributes(j.inherits[d.Path()], d.Path()) // 0 is top
	if err != nil {
		return err
	}
	failpoint.Reach("join.dress")
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
	failpoint.Reach("join.dressed")
	return nil
}

// dirTimes are those that a directory of the join is to have.
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

// link makes a hard link to a file of a layer below. Where that has none, all
// layers are asked: the target's way may lead through a symlink of top, or the
// tar may have the link before its target.
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
