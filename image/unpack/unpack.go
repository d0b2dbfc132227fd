package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"berth/image/unpack/checksum"
	"berth/image/unpack/tarsplit"
	"berth/internal/diskusage"
	"berth/internal/safefs"
)

const (
	// maxPath is the longest path in a layer (PATH_MAX less the zero). It bounds the depth of the
	// tree, too, because symlinks cannot make the tree deeper.
	maxPath = unix.PathMax - 1
	// maxNames bounds the memory for names that are kept until the end of a layer.
	maxNames = 64 << 20
	// perEntry is the memory of such a name in addition to its length: map entries and its place in
	// within.
	perEntry = 80
	// maxBlock is more than the block size of any filesystem (diskusage.BlockSize).
	maxBlock = 1 << 20
	// copySize is the size of one write.
	copySize = 128 << 10
	// freeSteps and stepsPerEntry limit the work of resolving paths through symlinks and missing
	// names. A path may contain forty symlinks of thousands of names. freeSteps steps take about
	// two seconds.
	freeSteps     = 1 << 18
	stepsPerEntry = 64
)

// impliedTime is the mtime of directories that the tar does not list. It is constant, because a
// layer should be the same on every machine.
var impliedTime = time.Unix(0, 0)

var copyPool = sync.Pool{New: func() any { return new([copySize]byte) }}

// unpacker writes one layer into a tree.
type unpacker struct {
	root    *os.File
	record  *tarsplit.Recorder
	tick    func() // reports progress
	parents *dirCache
	buf     *[copySize]byte
	hash    *xxhash.Digest // of a file's content
	block   int64          // of the filesystem, for counting

	// Keys are paths in the tree, free of symlinks.
	links   map[string]string    // hard links whose target is not in the layer
	implied map[string]bool      // directories the tar has not listed so far
	opaques map[string]bool      // directories that hide the layers below
	times   map[string]time.Time // of directories; set last, because adding entries changes them
	within  map[string][]string  // paths in the maps above by directory; may be outdated
	names   int                  // bytes left for the keys and targets above
	steps   int                  // left for walks

	usage       Usage
	sum         checksum.Sum
	whiteouts   int
	opaque      bool   // the root
	recount     bool   // something was removed, so finish computes usage, sum and whiteouts from the tree
	gone        string // the whiteout that a new directory is about to replace
	unsupported int    // extended attributes that the filesystem refused
}

func newUnpacker(root *os.File, memory int64, in *tarsplit.Recorder, tick func()) (*unpacker, error) {
	block, err := diskusage.BlockSize(root)
	if err != nil {
		return nil, err
	}
	return &unpacker{
		root: root, record: in, tick: tick, parents: newDirCache(), buf: copyPool.Get().(*[copySize]byte), hash: xxhash.New(),
		block: block,
		links: map[string]string{}, implied: map[string]bool{"": true}, opaques: map[string]bool{}, times: map[string]time.Time{"": impliedTime},
		within: map[string][]string{}, names: int(min(maxNames, memory)), steps: freeSteps,
		usage: Usage{Bytes: uint64(block), Inodes: 1},
	}, nil
}

func (u *unpacker) close() {
	u.parents.close()
	copyPool.Put(u.buf)
}

// next implements sink.
func (u *unpacker) next() {
	u.parents.reap()
	u.steps += stepsPerEntry
}

// filePlace is where an entry goes in a tree of files.
type filePlace = place[*safefs.Dir]

func (u *unpacker) file(at filePlace, hdr *tar.Header, content io.Reader) error {
	var f *os.File
	err := u.replacing(at, func() (err error) { f, err = at.dir.Create(at.name, uint32(hdr.Mode&0o777)); return err })
	if err != nil {
		return err
	}
	if !isSparse(hdr) {
		u.record.Content(hdr.Size, tarsplit.Ref{Name: at.path()})
	}
	written, holds, err := u.fill(f, hdr, content)
	if err == nil {
		err = u.fileAttributes(f, hdr)
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	u.count(written)
	u.summed(at, hdr, unix.S_IFREG|uint32(hdr.Mode&ModeBits), 0, holds)
	return nil
}

// summed adds a created file to the checksum.
func (u *unpacker) summed(at filePlace, hdr *tar.Header, mode uint32, dev uint64, holds checksum.Content) {
	u.sum.AddName(at.path(), mode)
	u.sum.AddFile(mode, uint32(hdr.Uid), uint32(hdr.Gid), dev, holds)
}

// fill writes the content of a file and returns the number of bytes that are not holes.
func (u *unpacker) fill(f *os.File, hdr *tar.Header, in io.Reader) (written int64, holds checksum.Content, err error) {
	u.hash.Reset()
	block := len(u.buf) // only long runs of zeros become holes, so that most files are in one piece
	if isSparse(hdr) {
		block = int(min(u.block, copySize))
	}
	end := int64(0) // of what was written
	in = io.TeeReader(in, u.hash)
	err = eachBlock(in, hdr.Size, u.buf[:], block, u.tick, func(block []byte, offset int64) error {
		written += int64(len(block))
		end = offset + int64(len(block))
		_, err := f.WriteAt(block, offset)
		return err
	})
	if err == nil && end < hdr.Size {
		err = f.Truncate(hdr.Size)
	}
	return written, checksum.Content{Size: hdr.Size, Hash: u.hash.Sum64()}, err
}

// onlyReader keeps io.Copy from using other methods of a reader.
type onlyReader struct{ io.Reader }

func (u *unpacker) directory(at filePlace, hdr *tar.Header) error {
	if err := at.dir.Mkdir(at.name, 0o755); errors.Is(err, unix.EEXIST) {
		return u.directoryAgain(at, hdr)
	} else if err != nil {
		return err
	}
	u.count(u.block)
	return u.newDirectory(at, hdr, u.forgetLink(at.path()))
}

// directoryAgain handles a directory entry for an existing name. An existing directory stays. Any
// other file is replaced by an opaque directory.
func (u *unpacker) directoryAgain(at filePlace, hdr *tar.Header) error {
	st, err := at.dir.Stat(at.name)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return u.newDirectory(at, hdr, false)
	}
	if err := u.clear(at, &st); err != nil {
		return err
	}
	if err := at.dir.Mkdir(at.name, 0o755); err != nil {
		return err
	}
	return u.newDirectory(at, hdr, true)
}

func (u *unpacker) newDirectory(at filePlace, hdr *tar.Header, opaque bool) error {
	dir, err := at.dir.Open(at.name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if opaque {
		if err := u.setOpaque(at.path()); err != nil {
			return err
		}
	}
	return u.listed(dir, hdr)
}

// listed gives a directory the attributes in its entry.
func (u *unpacker) listed(dir *safefs.Dir, hdr *tar.Header) error {
	delete(u.implied, dir.Path())
	if err := u.directoryAttributes(dir, hdr); err != nil {
		return err
	}
	if _, known := u.times[dir.Path()]; !known {
		u.enter(dir.Path())
	}
	u.times[dir.Path()] = hdr.ModTime
	return u.remember(len(dir.Path()))
}

// special makes a symlink, a device or a FIFO.
func (u *unpacker) special(at filePlace, hdr *tar.Header, mode uint32, dev uint64) error {
	create := func() error { return at.dir.Mknod(at.name, mode|0o600, dev) }
	perm, holds := uint32(hdr.Mode&ModeBits), checksum.Content{}
	if mode == unix.S_IFLNK {
		create = func() error { return at.dir.Symlink(hdr.Linkname, at.name) }
		perm, holds = 0o777, checksum.Content{Target: hdr.Linkname}
	}
	if err := u.replacing(at, create); err != nil {
		return err
	}
	u.count(0)
	if err := u.nodeAttributes(at, hdr, mode != unix.S_IFLNK); err != nil {
		return err
	}
	u.summed(at, hdr, mode|perm, dev, holds)
	return u.setTimesOf(at.dir, at.name, hdr)
}

func (u *unpacker) whiteout(at filePlace) error {
	return u.replacing(at, func() error { return u.makeWhiteout(at) })
}

// target implements sink. If the target is itself a link that Join will resolve, the new link gets
// that link's target.
func (u *unpacker) target(at filePlace) (mode uint32, below string, err error) {
	if below, ok := u.links[at.path()]; ok {
		return 0, below, nil
	}
	st, err := at.dir.Stat(at.name)
	if errors.Is(err, unix.ENOENT) || err == nil && IsWhiteout(&st) {
		return 0, at.path(), nil
	}
	return st.Mode & unix.S_IFMT, "", err
}

// link makes a hard link.
func (u *unpacker) link(at, target filePlace) error {
	st, err := target.dir.Stat(target.name)
	if err != nil {
		return err
	}
	if now, err := at.dir.Stat(at.name); err == nil && now.Ino == st.Ino {
		return nil // the name exists already, perhaps as its own target
	}
	if err := u.replacing(at, func() error { return at.dir.Link(target.dir, target.name, at.name) }); err != nil {
		return err
	}
	u.sum.AddName(at.path(), st.Mode)
	return nil
}

// linkBelow records a link whose target is in a layer below. Join creates it later.
func (u *unpacker) linkBelow(at filePlace, target string) error {
	if st, err := at.dir.Stat(at.name); err == nil {
		if err := u.clear(at, &st); err != nil {
			return err
		}
	}
	u.enter(at.path())
	u.links[at.path()] = target
	return u.remember(len(at.path()) + len(target))
}

// replacing calls make to create something. If the name exists, it removes it and calls make again.
func (u *unpacker) replacing(at filePlace, make func() error) error {
	err := make()
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if st, err = at.dir.Stat(at.name); err != nil {
			return err
		}
		if err = u.clear(at, &st); err != nil {
			return err
		}
		err = make()
	}
	if err == nil {
		u.forgetLink(at.path())
	}
	return err
}

// clear removes the file or tree at a place and the records about it.
func (u *unpacker) clear(at filePlace, st *unix.Stat_t) error {
	u.recount = true
	u.record.Drop() // the record may refer to the removed content
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		u.forgetBelow(at.path())
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR || st.Mode&unix.S_IFMT == unix.S_IFLNK {
		// Open directories may have been found through the removed name.
		u.parents.clear()
	}
	return at.dir.RemoveAll(at.name)
}

// forgetLink forgets a pending hard link at path, and reports whether there was one.
func (u *unpacker) forgetLink(path string) bool {
	if len(u.links) == 0 {
		return false
	}
	_, ok := u.links[path]
	delete(u.links, path)
	return ok
}

// enter records that a path, which was added to one of the maps, disappears with its directory.
func (u *unpacker) enter(path string) {
	dir, _ := safefs.Split(path)
	u.within[dir] = append(u.within[dir], path)
}

// forgetBelow removes the records about dir and its content.
func (u *unpacker) forgetBelow(dir string) {
	for _, path := range u.within[dir] {
		u.forgetBelow(path)
	}
	delete(u.within, dir)
	delete(u.links, dir)
	delete(u.implied, dir)
	delete(u.opaques, dir)
	delete(u.times, dir)
}

// parent opens the directory an entry goes to. It belongs to the cache.
func (u *unpacker) parent(dir string) (*safefs.Dir, error) {
	d, err := u.lookup(dir)
	if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) {
		return d, err
	}
	maker := safefs.Maker{Perm: 0o755, Made: u.impliedMade, Blocked: u.blocked, Step: u.step}
	if d, err = maker.MkdirAll(u.root, dir); err != nil {
		return nil, err
	}
	return u.parents.put(dir, d), nil
}

// lookup opens a directory if it exists. It belongs to the cache.
func (u *unpacker) lookup(dir string) (*safefs.Dir, error) {
	if d := u.parents.get(dir); d != nil {
		return d, nil
	}
	d, err := safefs.OpenDir(u.root, dir)
	if errors.Is(err, unix.ELOOP) { // a symlink on the path must be followed
		d, err = safefs.Maker{Step: u.step}.ResolveDir(u.root, dir)
	}
	if err != nil {
		return nil, err
	}
	return u.parents.put(dir, d), nil
}

// step pays for a step of a walk.
func (u *unpacker) step(cost int) error {
	if u.steps -= cost; u.steps < 0 {
		return exceeds("paths of its files lead through too many symlinks and directories")
	}
	return nil
}

// impliedMade records a directory that the tar has not listed.
func (u *unpacker) impliedMade(dir *safefs.Dir) error {
	if len(dir.Path()) > maxPath {
		return unix.ENAMETOOLONG
	}
	u.count(u.block)
	u.enter(dir.Path())
	u.times[dir.Path()] = impliedTime
	if u.forgetLink(dir.Path()) || u.gone == dir.Path() {
		u.gone = ""
		return u.setOpaque(dir.Path())
	}
	u.implied[dir.Path()] = true
	return u.remember(2 * len(dir.Path()))
}

// remember counts the bytes of names that are kept.
func (u *unpacker) remember(n int) error {
	if u.names -= n + perEntry; u.names < 0 {
		return &Error{MoreMemory, errors.New("the names of its directories and links take too much memory")}
	}
	return nil
}

// setTimes sets the times of all directories. Then their attributes are complete, and it adds the
// directories to the sum.
func (u *unpacker) setTimes() error {
	for name, t := range u.times {
		u.tick()
		if err := u.setTime(name, timespec(t)); err != nil {
			return err
		}
	}
	return nil
}

func (u *unpacker) setTime(name string, t unix.Timespec) (err error) {
	dir, err := safefs.OpenDir(u.root, name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	if err := dir.Utimes("", t, t); err != nil {
		return err
	}
	st, err := dir.Stat("")
	if err != nil {
		return err
	}
	u.sum.AddName(name, st.Mode)
	u.sum.AddStatus(&st, checksum.Content{})
	return nil
}

// finish implements sink.
func (u *unpacker) finish(ctx context.Context) (Contents, error) {
	if err := u.setTimes(); err != nil {
		return Contents{}, err
	}
	if u.recount {
		var err error
		if u.usage, err = countTree(u.root, u.block); err != nil {
			return Contents{}, err
		}
		found, err := checksum.OfDirectory(ctx, u.root, u.tick)
		if err != nil {
			return Contents{}, err
		}
		u.sum, u.whiteouts = found.Sum, found.Whiteouts
	}
	c := Contents{
		Summary:     Summary{Usage: u.usage, Opaque: u.opaque, Whiteouts: u.whiteouts, Sum: u.sum},
		Unsupported: u.unsupported,
	}
	for _, name := range slices.Sorted(maps.Keys(u.links)) {
		c.Links = append(c.Links, Link{Name(name), Name(u.links[name])})
	}
	c.Implied = sortedNames(u.implied)
	c.Opaques = sortedNames(u.opaques)
	return c, c.Check()
}

func sortedNames(set map[string]bool) (list []Name) {
	for _, name := range slices.Sorted(maps.Keys(set)) {
		list = append(list, Name(name))
	}
	return list
}

// countTree counts a complete tree in the same way as count.
func countTree(root *os.File, block int64) (Usage, error) {
	return diskusage.Nominal(context.Background(), root, block)
}

// count adds a file with n bytes of data to the usage.
func (u *unpacker) count(n int64) {
	u.usage.Inodes++
	u.usage.Bytes += uint64((n + u.block - 1) / u.block * u.block)
}
