package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"berth/image/blobindex"
	"berth/image/tree"
	"berth/image/unpack/checksum"
	"berth/image/unpack/tarsplit"
)

// Pack is Layer without a filesystem. It appends the content of files to data and writes the tree
// to out (tree.Encode), both empty files. It needs no other access. It keeps the tree in memory
// until the end. If the tree needs more than Limits.Memory bytes, the error is MoreMemory.
//
// The tree, and not Contents, records the properties that depend on the layers below. Usage is not
// counted. A file with more or longer extended attributes than a tree may have is OutOfRange. Files
// do not inherit a directory's default ACL, because a tar lists all attributes.
func Pack(ctx context.Context, data, out *os.File, blob io.Reader, job Job) (Result, error) {
	memory := job.Limits.WithDefaults().Memory
	return run(ctx, blob, job, func(in *tarsplit.Recorder, points *blobindex.Recorder, tick func()) (sink[found], error) {
		p := &packer{
			root: &tree.Node{Mode: unix.S_IFDIR | 0o755, Implied: true, Children: map[string]*tree.Node{}},
			data: &dataFile{out: data, buf: make([]byte, 0, dataBuffer), discard: job.NoData},
			out:  out, tick: tick, memory: memory, left: memory, hash: xxhash.New(),
			record: in, points: points,
		}
		return p, p.keep(tree.NodeMemory + tree.DirMemory) // the root
	})
}

// packer keeps the tree of one layer in memory.
type packer struct {
	root        *tree.Node
	data        *dataFile
	out         io.Writer
	tick        func()
	memory      int64 // for the tree
	left        int64 // of that
	steps       int   // left for walks
	hash        *xxhash.Digest
	opaque      bool
	unsupported int
	last        found // the directory of the entry before
	record      *tarsplit.Recorder
	points      *blobindex.Recorder
}

// found is a directory of the tree with its path, which is free of symlinks.
type found struct {
	*tree.Node
	path string
}

// Path implements directory.
func (f found) Path() string { return f.path }

// spot is where an entry goes in a tree in memory.
type spot = place[found]

// at returns the node at a spot, or nil.
func (p *packer) at(s spot) *tree.Node { return s.dir.Children[s.name] }

func (p *packer) close() {}

// next implements sink.
func (p *packer) next() { p.steps += stepsPerEntry }

// finish implements sink.
func (p *packer) finish(context.Context) (Contents, error) {
	if err := p.data.finish(); err != nil {
		return Contents{}, err
	}
	p.root.Opaque = p.opaque
	c := Contents{Unsupported: p.unsupported}
	c.Opaque = p.opaque
	found, err := checksum.OfTree(p.root, p.tick, func(n *tree.Node) (uint64, error) { return n.Data.Hash, nil })
	if err != nil {
		return Contents{}, err
	}
	c.Sum, c.Whiteouts = found.Sum, found.Whiteouts
	return c, tree.Encode(p.out, p.root)
}

// hideAll implements sink.
func (p *packer) hideAll(dir found) error {
	if dir.Node == p.root {
		p.opaque = true
	} else {
		dir.Opaque = true
	}
	return nil
}

// hide implements sink.
func (p *packer) hide(at spot) error {
	n := p.at(at)
	if n == nil {
		return p.whiteout(at)
	}
	if n.IsDir() {
		n.Implied, n.Opaque = false, true // the directory below is hidden, with its attributes
	}
	return nil
}

func (p *packer) whiteout(at spot) error { return p.add(at, &tree.Node{Mode: unix.S_IFCHR}) }

// add gives a node a name and replaces the node that has it.
func (p *packer) add(at spot, n *tree.Node) error {
	takes := tree.NodeMemory + textMemory(at.name) + textMemory(n.Target)
	if n.IsDir() {
		takes += tree.DirMemory
	}
	if err := p.keep(takes); err != nil {
		return err
	}
	if old := p.at(at); old != nil && (old.IsDir() || old.Type() == unix.S_IFLNK) {
		p.last = found{} // the directory may have been found through the replaced node
	}
	at.dir.Children[strings.Clone(at.name)] = n // the strings of archive/tar are parts of the whole header, which may have a megabyte
	return nil
}

func textMemory[T string | []byte](text T) uint64 { return tree.TextMemory(uint64(len(text))) }

// keep counts bytes that stay in memory until the end, in the same way as tree.Decode.
func (p *packer) keep(n uint64) error {
	if p.left -= int64(n); p.left < 0 {
		return &Error{MoreMemory, fmt.Errorf("its tree takes more than the %d bytes of memory allowed", p.memory)}
	}
	return nil
}

func (p *packer) file(at spot, hdr *tar.Header, content io.Reader) error {
	n := &tree.Node{Mode: unix.S_IFREG}
	if err := p.setAttributes(n, hdr); err != nil {
		return err
	}
	var err error
	p.hash.Reset()
	n.Data.Block = p.data.block()
	if isSparse(hdr) {
		p.points.Drop() // its content is not a range of the tar
		err = p.data.writeSparse(&n.Data, hdr.Size, io.TeeReader(content, p.hash), p.tick)
	} else {
		p.record.Content(hdr.Size, tarsplit.Ref{Offset: int64(n.Data.Block) * tree.BlockSize})
		n.Data.Size, err = p.data.write(content, p.hash)
	}
	if err != nil {
		return err
	}
	n.Data.Hash = p.hash.Sum64()
	if err := p.keep(textMemory(n.Data.Holes)); err != nil {
		return err
	}
	return p.add(at, n)
}

func (p *packer) directory(at spot, hdr *tar.Header) error {
	if old := p.at(at); old != nil && old.IsDir() {
		return p.describe(old, hdr)
	}
	n := tree.NewDir()
	n.Opaque = p.at(at) != nil // the replaced whiteout hid the layers below
	if err := p.add(at, n); err != nil {
		return err
	}
	return p.describe(n, hdr)
}

// listed implements sink.
func (p *packer) listed(dir found, hdr *tar.Header) error { return p.describe(dir.Node, hdr) }

// describe gives a directory the attributes in its entry.
func (p *packer) describe(n *tree.Node, hdr *tar.Header) error {
	n.Implied = false
	return p.setAttributes(n, hdr)
}

// special makes a symlink, a device or a FIFO.
func (p *packer) special(at spot, hdr *tar.Header, mode uint32, dev uint64) error {
	n := &tree.Node{Mode: mode, Major: unix.Major(dev), Minor: unix.Minor(dev)}
	if mode == unix.S_IFLNK {
		n.Target = strings.Clone(hdr.Linkname)
	}
	if err := p.setAttributes(n, hdr); err != nil {
		return err
	}
	return p.add(at, n)
}

// target implements sink.
func (p *packer) target(at spot) (mode uint32, below string, err error) {
	switch n := p.at(at); {
	case n == nil || n.IsWhiteout():
		return 0, at.path(), nil
	case n.IsLink():
		return 0, n.Target, nil
	default:
		return n.Type(), "", nil
	}
}

// link gives a file another name.
func (p *packer) link(at, target spot) error {
	if strings.HasPrefix(target.path(), at.path()+"/") {
		return unix.ENOENT // the link replaces the directory that contains the target
	}
	return p.add(at, p.at(target))
}

// linkBelow records a hard link to a file of a layer below.
func (p *packer) linkBelow(at spot, target string) error {
	return p.add(at, &tree.Node{Target: strings.Clone(target)})
}

// parent returns the directory of an entry and creates missing directories.
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

const (
	maxLinks     = 40 // the kernel's own limit of symlinks in one resolution (MAXSYMLINKS)
	namesPerStep = 16 // number of path names that can be copied in the time of a step
)

// walk follows a path as a process with the layer as its root would. With create set it creates
// missing directories, including the target of a dangling symlink.
func (p *packer) walk(dir string, making bool) (found, error) {
	trail := []found{{p.root, ""}}
	rest := strings.Split(dir, "/")
	for links := 0; len(rest) > 0; {
		cur, name := trail[len(trail)-1], rest[0]
		rest = rest[1:]
		if links > 0 {
			if p.steps--; p.steps < -freeSteps {
				return found{}, exceeds("paths of its files lead through too many symlinks and directories")
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
		n := p.at(at)
		if n != nil && n.Type() == unix.S_IFLNK {
			if links++; links > maxLinks {
				return found{}, unix.ELOOP
			}
			if path.IsAbs(n.Target) {
				trail = trail[:1]
			}
			rest = slices.Concat(strings.Split(n.Target, "/"), rest)
			p.steps -= len(rest) / namesPerStep
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
	// A directory replaces a whiteout or a link, and hides the same files below.
	made.Opaque, made.Implied = n != nil, n == nil
	return made, p.add(at, made)
}

// dataBuffer is the size in bytes of one write to the data file.
const dataBuffer = 256 << 10

// dataFile is written sequentially, except for holes.
type dataFile struct {
	out *os.File
	pos int64  // offset of buf in the file; a multiple of the block size after each file
	buf []byte // of dataBuffer at most

	discard bool // nothing is written
}

// block returns the first block of the next file.
func (d *dataFile) block() uint32 { return uint32((d.pos + int64(len(d.buf))) / tree.BlockSize) }

// room fails if block addresses do not suffice, because EROFS has four bytes for them.
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
		if err == io.EOF { //nolint:errorlint // a wrapped EOF is an error
			break
		}
		if err == nil {
			err = d.room(0)
		}
		if err != nil {
			return size, err
		}
	}
	// The buffer has a whole number of blocks, so the padding fits.
	rest := int(-size & (tree.BlockSize - 1))
	d.buf = append(d.buf, zeros[:rest]...)
	return size, nil
}

// flush writes the buffer, or leaves a hole if it is all zeros.
func (d *dataFile) flush() error {
	if !isZero(d.buf) {
		if err := d.writeAt(d.buf, d.pos); err != nil {
			return err
		}
	}
	d.pos += int64(len(d.buf))
	d.buf = d.buf[:0]
	return nil
}

func (d *dataFile) writeAt(p []byte, offset int64) error {
	if d.discard {
		return nil
	}
	_, err := d.out.WriteAt(p, offset)
	return err
}

// writeSparse omits zero blocks.
func (d *dataFile) writeSparse(at *tree.Data, size int64, in io.Reader, tick func()) error {
	if err := errors.Join(d.flush(), d.room(size)); err != nil {
		return err
	}
	at.Size, at.ChunkBits = size, tree.ChunkBitsOf(size)
	at.Holes = make([]byte, (at.Chunks()+7)/8)
	for chunk := range at.Chunks() {
		at.Holes[chunk/8] |= 1 << (chunk % 8)
	}
	err := eachBlock(in, size, d.buf[:cap(d.buf)], tree.BlockSize, tick, func(block []byte, offset int64) error {
		chunk := offset / tree.BlockSize >> at.ChunkBits
		at.Holes[chunk/8] &^= 1 << (chunk % 8)
		return d.writeAt(block, d.pos+offset)
	})
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(at.Holes, func(bits byte) bool { return bits != 0 }) {
		at.Holes, at.ChunkBits = nil, 0
	}
	d.pos += at.Blocks() * tree.BlockSize
	return nil
}

// finish writes the remaining data. The file then has a whole number of blocks, possibly with a
// hole at its end.
func (d *dataFile) finish() error {
	if err := d.flush(); err != nil {
		return err
	}
	return d.out.Truncate(d.pos)
}
