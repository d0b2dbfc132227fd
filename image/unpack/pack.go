package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/safefs"
)

// Pack does what Layer does without a filesystem: it appends the files' data to data and writes the tree to out (tree.Encode), both
// empty files, and needs nothing else. It makes the same of a tar as Layer, with these differences: the tree is in memory until the
// end, at most maxTree bytes of it; what remains for those who know the layers below is in the tree and not in Contents; Usage is
// not counted; an extended attribute has one byte less at most than Linux takes; and where a directory has a default ACL, what is in
// it does not inherit that, for a tar lists all attributes.
func Pack(ctx context.Context, data, out *os.File, blob io.Reader, job Job) (Result, error) {
	return run(ctx, blob, job, func(limits Limits, tick func()) (sink, error) {
		return &packer{
			root: &tree.Node{Mode: unix.S_IFDIR | 0o755, Implied: true, Children: map[string]*tree.Node{}},
			data: &dataFile{out: data, buf: make([]byte, 0, dataBuffer)}, out: out, limits: limits, tick: tick, left: maxTree, hash: xxhash.New(),
		}, nil
	})
}

const (
	// maxTree bounds the memory for a tree: perNode bytes and its names for each file.
	maxTree = 384 << 20
	perNode = 400
)

// packer keeps the tree of one layer in memory.
type packer struct {
	root        *tree.Node
	data        *dataFile
	out         io.Writer
	limits      Limits
	tick        func()
	left        int // bytes for the tree
	steps       int // left for walks
	hash        *xxhash.Digest
	opaque      bool
	unsupported int
	last        found // the directory of the entry before
}

// found is a directory of the tree with its path, which is free of symlinks.
type found struct {
	*tree.Node
	path string
}

// spot is where an entry goes.
type spot struct {
	dir  found
	name string
}

func (s spot) path() string     { return safefs.Join(s.dir.path, s.name) }
func (s spot) get() *tree.Node  { return s.dir.Children[s.name] }
func (s spot) put(n *tree.Node) { s.dir.Children[s.name] = n }

func (p *packer) close() {}

func (p *packer) unpack(ctx context.Context, tr *tar.Reader) error {
	if err := eachEntry(ctx, tr, p.limits, p.entry); err != nil {
		return err
	}
	return p.data.finish()
}

func (p *packer) contents(context.Context) (Contents, error) {
	p.root.Opaque = p.opaque
	c := Contents{Unsupported: p.unsupported}
	c.Opaque = p.opaque
	c.Whiteouts, c.Sum, _ = sumOf(p.root, p.tick, func(n *tree.Node) (uint64, error) { return n.Data.Hash, nil })
	return c, tree.Encode(p.out, p.root)
}

// entry packs one entry of the tar.
func (p *packer) entry(hdr *tar.Header, content io.Reader) error {
	p.steps += stepsPerEntry
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil // comments, such as git's commit id
	}
	name := safefs.Clean(hdr.Name)
	if len(name) > maxPath {
		return unix.ENAMETOOLONG
	}
	if name == "" {
		if hdr.Typeflag != tar.TypeDir {
			return refuse("the root is no directory")
		}
		return p.listed(p.root, hdr)
	}
	dir, base := safefs.Split(name)
	if isAUFS(name) {
		return nil
	}
	hidden, isWhiteout := strings.CutPrefix(base, whiteoutPrefix)
	if isWhiteout && base != opaqueWhiteout {
		if hidden == "" || hidden == "." || hidden == ".." {
			return refuse("a whiteout of nothing")
		}
		base = hidden
	}
	parent, err := p.parent(dir)
	if err != nil {
		return err
	}
	if isWhiteout && base == opaqueWhiteout {
		p.hideAll(parent)
		return nil
	}
	at := spot{parent, base}
	if err := checkName(at.path(), base); err != nil {
		return err
	}
	if isWhiteout {
		return p.hide(at)
	}
	return p.make(at, hdr, content)
}

// checkName fails as the kernel does.
func checkName(path, name string) error {
	if len(name) > unix.NAME_MAX || len(path) > maxPath {
		return unix.ENAMETOOLONG
	}
	if strings.ContainsRune(name, 0) {
		return unix.EINVAL
	}
	return nil
}

// hideAll is for an opaque whiteout.
func (p *packer) hideAll(dir found) {
	if dir.Node == p.root {
		p.opaque = true
		return
	}
	dir.Opaque = true
}

// hide hides what the layers below have at a place; what this layer has stays.
func (p *packer) hide(at spot) error {
	n := at.get()
	if n == nil {
		return p.add(at, &tree.Node{Mode: unix.S_IFCHR})
	}
	if n.IsDir() {
		n.Implied, n.Opaque = false, true // the one below is gone, its attributes with it
	}
	return nil
}

// make makes the file of an entry, by its type.
func (p *packer) make(at spot, hdr *tar.Header, content io.Reader) error {
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return p.file(at, hdr, content)
	case tar.TypeDir:
		return p.directory(at, hdr)
	case tar.TypeSymlink:
		return p.symlink(at, hdr)
	case tar.TypeLink:
		return p.link(at, hdr)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return p.node(at, hdr)
	}
	return refuse("unknown type %q", hdr.Typeflag)
}

// add gives a node a name, in place of what is there.
func (p *packer) add(at spot, n *tree.Node) error {
	if err := p.keep(perNode + len(at.name) + len(n.Target)); err != nil {
		return err
	}
	if old := at.get(); old != nil && (old.IsDir() || old.Type() == unix.S_IFLNK) {
		p.last = found{} // it may have been found through that
	}
	at.put(n)
	return nil
}

// keep counts bytes that are in memory until the end.
func (p *packer) keep(n int) error {
	if p.left -= n; p.left < 0 {
		return exceeds("its tree takes more than the %d bytes of memory allowed", maxTree)
	}
	return nil
}

func (p *packer) file(at spot, hdr *tar.Header, content io.Reader) error {
	n := &tree.Node{Mode: unix.S_IFREG}
	if err := p.dress(n, hdr); err != nil {
		return err
	}
	var err error
	p.hash.Reset()
	n.Data.Block = p.data.block()
	if isSparse(hdr) {
		err = p.data.writeSparse(&n.Data, hdr.Size, io.TeeReader(content, p.hash), p.tick)
	} else {
		n.Data.Size, err = p.data.write(content, p.hash)
	}
	if err != nil {
		return err
	}
	n.Data.Hash = p.hash.Sum64()
	if err := p.keep(len(n.Data.Holes)); err != nil {
		return err
	}
	return p.add(at, n)
}

func (p *packer) directory(at spot, hdr *tar.Header) error {
	if old := at.get(); old != nil && old.IsDir() {
		return p.listed(old, hdr)
	}
	n := tree.NewDir()
	n.Opaque = at.get() != nil // whatever gives way to it hid what the layers below have
	if err := p.add(at, n); err != nil {
		return err
	}
	return p.listed(n, hdr)
}

// listed gives a directory what its entry says.
func (p *packer) listed(n *tree.Node, hdr *tar.Header) error {
	n.Implied = false
	return p.dress(n, hdr)
}

func (p *packer) symlink(at spot, hdr *tar.Header) error {
	switch {
	case hdr.Linkname == "":
		return refuse("a symlink without a target")
	case len(hdr.Linkname) > maxPath:
		return unix.ENAMETOOLONG
	case strings.ContainsRune(hdr.Linkname, 0):
		return unix.EINVAL
	}
	n := &tree.Node{Mode: unix.S_IFLNK, Target: hdr.Linkname}
	if err := p.dress(n, hdr); err != nil {
		return err
	}
	return p.add(at, n)
}

// link gives a file of the layer another name, or notes one that a file of a layer below is to have.
func (p *packer) link(at spot, hdr *tar.Header) error {
	target := safefs.Clean(hdr.Linkname)
	if target == "" || len(target) > maxPath || strings.ContainsRune(target, 0) {
		return refuse("a hard link to %q", hdr.Linkname)
	}
	dir, base := safefs.Split(target)
	if len(base) > unix.NAME_MAX {
		return unix.ENAMETOOLONG
	}
	in, err := p.lookup(dir)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return p.add(at, &tree.Node{Target: target})
	}
	if err != nil {
		return err
	}
	old := spot{in, base}
	switch n := old.get(); {
	case n == nil || n.IsWhiteout():
		return p.add(at, &tree.Node{Target: old.path()})
	case n.IsLink():
		return p.add(at, &tree.Node{Target: n.Target})
	case n.IsDir():
		return refuse("a hard link to the directory %q", hdr.Linkname)
	case strings.HasPrefix(old.path(), at.path()+"/"):
		return unix.ENOENT // it goes with the directory whose place the link takes
	default:
		return p.add(at, n)
	}
}

func (p *packer) node(at spot, hdr *tar.Header) error {
	types := map[byte]uint32{tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK, tar.TypeFifo: unix.S_IFIFO}
	if err := checkDevice(hdr); err != nil {
		return err
	}
	n := &tree.Node{Mode: types[hdr.Typeflag]}
	if n.Type() != unix.S_IFIFO {
		n.Major, n.Minor = uint32(hdr.Devmajor), uint32(hdr.Devminor)
	}
	if !n.IsWhiteout() {
		if err := p.dress(n, hdr); err != nil {
			return err
		}
	}
	return p.add(at, n)
}

// parent finds the directory an entry goes to, and makes what is missing of it.
func (p *packer) parent(dir string) (found, error) {
	if p.last.Node != nil && p.last.path == dir {
		return p.last, nil
	}
	d, err := p.walk(dir, true)
	if err == nil && d.path == dir {
		p.last = d
	}
	return d, err
}

// lookup finds a directory if it exists.
func (p *packer) lookup(dir string) (found, error) { return p.walk(dir, false) }

// maxLinks is the kernel's own limit of symlinks in one resolution (MAXSYMLINKS).
const maxLinks = 40

// walk follows a path as a process with the layer as its root would. If it is to make what is missing, that includes the target of
// a dangling symlink.
func (p *packer) walk(dir string, making bool) (found, error) {
	trail := []found{{p.root, ""}}
	rest := strings.Split(dir, "/")
	for links := 0; len(rest) > 0; {
		cur, name := trail[len(trail)-1], rest[0]
		rest = rest[1:]
		if links > 0 {
			if p.steps--; p.steps < -freeSteps {
				return found{}, exceeds("the way to its files leads through too many symlinks and directories")
			}
		}
		switch name {
		case "", ".":
			continue
		case "..":
			trail = trail[:max(len(trail)-1, 1)]
			continue
		}
		at := spot{cur, name}
		n := at.get()
		if n != nil && n.Type() == unix.S_IFLNK {
			if links++; links > maxLinks {
				return found{}, unix.ELOOP
			}
			if path.IsAbs(n.Target) {
				trail = trail[:1]
			}
			rest = slices.Concat(strings.Split(n.Target, "/"), rest)
			continue
		}
		n, err := p.enter(at, n, making)
		if err != nil {
			return found{}, err
		}
		trail = append(trail, found{n, at.path()})
	}
	return trail[len(trail)-1], nil
}

// enter goes into the directory at a place, or makes one there.
func (p *packer) enter(at spot, n *tree.Node, making bool) (*tree.Node, error) {
	if err := checkName(at.path(), at.name); err != nil {
		return nil, err
	}
	switch {
	case n != nil && n.IsDir():
		return n, nil
	case n != nil && !n.IsLink() && !(n.IsWhiteout() && making):
		return nil, unix.ENOTDIR
	case !making:
		return nil, unix.ENOENT
	}
	made := tree.NewDir()
	made.Sec, made.Nsec = impliedTime.Unix(), 0
	// A whiteout gives way, and so does a link: the directory then hides what they hid.
	made.Opaque, made.Implied = n != nil, n == nil
	return made, p.add(at, made)
}

// dataBuffer is how much is written to the data file at once.
const dataBuffer = 256 << 10

// dataFile is written forward, but for holes.
type dataFile struct {
	out *os.File
	pos int64  // where buf goes: always a multiple of the block size after a file
	buf []byte // of dataBuffer at most
}

// block is where the next file begins.
func (d *dataFile) block() uint32 { return uint32((d.pos + int64(len(d.buf))) / tree.BlockSize) }

// room fails where block addresses end: EROFS has four bytes for them.
func (d *dataFile) room(size int64) error {
	if (d.pos+int64(len(d.buf))+size)/tree.BlockSize >= 1<<32-2 {
		return exceeds("its files take too many blocks")
	}
	return nil
}

// write appends a file's content, which is hashed, and fills its last block.
func (d *dataFile) write(in io.Reader, hash io.Writer) (size int64, err error) {
	for {
		if len(d.buf) == cap(d.buf) {
			if err := d.flush(); err != nil {
				return size, err
			}
		}
		n, err := in.Read(d.buf[len(d.buf):cap(d.buf)])
		_, _ = hash.Write(d.buf[len(d.buf) : len(d.buf)+n]) // it never fails
		d.buf = d.buf[:len(d.buf)+n]
		size += int64(n)
		if err == io.EOF {
			break
		}
		if err == nil {
			err = d.room(0)
		}
		if err != nil {
			return size, err
		}
	}
	// The buffer is a whole number of blocks, so this fits.
	rest := int(-size & (tree.BlockSize - 1))
	d.buf = append(d.buf, zeros[:rest]...)
	return size, nil
}

func (d *dataFile) flush() error {
	if _, err := d.out.WriteAt(d.buf, d.pos); err != nil {
		return err
	}
	d.pos += int64(len(d.buf))
	d.buf = d.buf[:0]
	return nil
}

// writeSparse leaves out what is zero: archive/tar expands holes.
func (d *dataFile) writeSparse(at *tree.Data, size int64, in io.Reader, tick func()) error {
	if err := errors.Join(d.flush(), d.room(size)); err != nil {
		return err
	}
	at.Size, at.ChunkBits = size, tree.ChunkBitsOf(size)
	at.Holes = make([]byte, (at.Chunks()+7)/8)
	for chunk := range at.Chunks() {
		at.Holes[chunk/8] |= 1 << (chunk % 8)
	}
	buf, some := d.buf[:cap(d.buf)], false
	for offset := int64(0); ; {
		n, err := io.ReadFull(in, buf)
		tick() // a hole takes time, and no byte of the tar
		for block := range slices.Chunk(buf[:n], tree.BlockSize) {
			if !isZero(block) {
				if _, err := d.out.WriteAt(block, d.pos+offset); err != nil {
					return err
				}
				chunk := offset / tree.BlockSize >> at.ChunkBits
				at.Holes[chunk/8] &^= 1 << (chunk % 8)
			} else {
				some = true
			}
			offset += int64(len(block))
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF && offset == size {
			break
		}
		if err != nil {
			return err
		}
	}
	if !some {
		at.Holes, at.ChunkBits = nil, 0
	}
	d.pos += at.Blocks() * tree.BlockSize
	return nil
}

func isZero(block []byte) bool { return string(block) == string(zeros[:len(block)]) }

// finish writes what is left. The file has a whole number of blocks then, with a hole at its end too.
func (d *dataFile) finish() error {
	if err := d.flush(); err != nil {
		return err
	}
	return d.out.Truncate(d.pos)
}
