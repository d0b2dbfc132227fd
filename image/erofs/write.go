package erofs

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/image/tree"
)

// MaxDevices limits the data files of an image. The root's inode follows their table and has a
// two-byte number.
const MaxDevices = 8000

// From fs/erofs/erofs_fs.h.
const (
	blockSize = tree.BlockSize
	blockBits = 12
	slotSize  = 32 // inodes are numbered by where they begin, in slots

	superOffset   = 1024
	superSize     = 128
	superMagic    = 0xE0F5E1E2
	deviceSize    = 128
	compatChecked = 0x1 // the superblock has a checksum
	incompatChunk = 0x4
	incompatDevs  = 0x8

	inodeSize     = 64 // of an extended inode
	extended      = 1
	layoutPlain   = 0 << 1
	layoutInline  = 2 << 1
	layoutChunked = 4 << 1

	chunkIndexes = 0x20 // each chunk names its device
	maxChunkBits = 0x1f // the field's size: chunks of 8 TiB
	chunkSize    = 8    // of a chunk's index
	noBlock      = math.MaxUint32

	direntSize    = 12
	xattrHeader   = 12
	xattrEntry    = 4
	xattrAlign    = 4
	maxInlineTail = blockSize / 2 // longer tails would leave too much empty space before them
)

// fileTypes are the types in directory entries.
var fileTypes = map[uint32]byte{
	unix.S_IFREG: 1, unix.S_IFDIR: 2, unix.S_IFCHR: 3, unix.S_IFBLK: 4, unix.S_IFIFO: 5, unix.S_IFLNK: 7,
}

// xattrPrefixes are prefixes of attribute names, by number. The first that matches is used.
var xattrPrefixes = []struct {
	prefix string
	number byte
}{{"user.", 1}, {"system.posix_acl_access", 2}, {"system.posix_acl_default", 3}, {"security.", 6}}

// inode is a node with its place in the image.
type inode struct {
	*tree.Node
	parent *inode
	number uint32 // in the order of names
	links  uint32
	pos    int64 // of its first byte
	xattrs int   // bytes of extended attributes
	layout uint16
	size   int64
	blocks int64 // of a directory or a symlink target, that are not beside the inode
	at     int64 // the first of them
	kids   []kid // of a directory, sorted by name
}

// kid is an entry of a directory.
type kid struct {
	name string
	to   *inode
}

// Write writes the image of a tree and returns its size in bytes. devices has the number of blocks
// of each data file.
func Write(out io.Writer, root *tree.Node, devices []int64) (int64, error) {
	if len(devices) > MaxDevices {
		return 0, fmt.Errorf("write EROFS image: %d devices, more than the %d possible", len(devices), MaxDevices)
	}
	p := &plan{known: map[*tree.Node]*inode{}, devices: devices}
	if err := p.number(root); err != nil {
		return 0, fmt.Errorf("write EROFS image: %w", err)
	}
	p.place()
	w := &writer{out: bufio.NewWriterSize(out, 256<<10)}
	w.super(p)
	for _, i := range p.inodes {
		w.inode(i)
	}
	for _, i := range p.inodes {
		w.blocks(i)
	}
	w.align(blockSize)
	if err := w.out.Flush(); err != nil {
		return 0, fmt.Errorf("write EROFS image: %w", err)
	}
	return w.pos, nil
}

// plan is the layout of an image.
type plan struct {
	inodes  []*inode // in write order, the root first
	known   map[*tree.Node]*inode
	devices []int64
	blocks  int64 // of the image
}

// number makes inodes of the nodes, depth first.
func (p *plan) number(root *tree.Node) error {
	if !root.IsDir() {
		return fmt.Errorf("its root is no directory")
	}
	r, err := p.add(root, nil)
	if err != nil {
		return err
	}
	r.parent, r.links = r, r.links+1
	return nil
}

func (p *plan) add(n *tree.Node, parent *inode) (*inode, error) {
	if i := p.known[n]; i != nil {
		if n.IsDir() {
			return nil, fmt.Errorf("a directory with two names")
		}
		i.links++
		return i, nil
	}
	if fileTypes[n.Type()] == 0 || n.IsWhiteout() {
		return nil, fmt.Errorf("a file of mode %#o", n.Mode)
	}
	if n.Type() == unix.S_IFREG && n.Data.Size > 0 && (n.Data.Device < 0 || n.Data.Device >= len(p.devices) ||
		int64(n.Data.Block)+n.Data.Blocks() > p.devices[n.Data.Device]) {
		return nil, fmt.Errorf("%d bytes at block %d of device %d are out of range",
			n.Data.Size, n.Data.Block, n.Data.Device)
	}
	i := &inode{Node: n, parent: parent, number: uint32(len(p.inodes) + 1), links: 1, xattrs: xattrSize(n.Xattrs)}
	p.known[n] = i
	p.inodes = append(p.inodes, i)
	if !n.IsDir() {
		return i, nil
	}
	i.kids = make([]kid, 0, len(n.Children)+2)
	i.kids = append(i.kids, kid{".", i}, kid{"..", parent})
	for _, name := range n.Names() {
		child, err := p.add(n.Children[name], i)
		if err != nil {
			return nil, fmt.Errorf("%.100q: %w", name, err)
		}
		if child.IsDir() {
			i.links++
		}
		i.kids = append(i.kids, kid{name, child})
	}
	if parent == nil {
		i.kids[1].to = i
	} else {
		i.links++ // for the entry "."; the name in parent is counted already
	}
	slices.SortFunc(i.kids, func(a, b kid) int { return strings.Compare(a.name, b.name) })
	return i, nil
}

// place decides where each inode goes. Then it places the blocks that are not beside an inode.
func (p *plan) place() {
	pos := roundUp(superOffset+superSize+deviceSize*int64(len(p.devices)), blockSize)
	for _, i := range p.inodes {
		pos = i.place(pos)
	}
	block := roundUp(pos, blockSize) / blockSize
	for _, i := range p.inodes {
		i.at = block
		block += i.blocks
	}
	p.blocks = block
}

// place puts the inode at pos or soon after it, and returns where it ends.
func (i *inode) place(pos int64) int64 {
	pos = roundUp(pos, slotSize)
	if pos%blockSize+inodeSize > blockSize {
		pos = roundUp(pos, blockSize)
	}
	head := inodeSize + int64(i.xattrs)
	switch i.Type() {
	case unix.S_IFREG:
		i.pos, i.size = pos, i.Data.Size
		if i.size == 0 {
			i.layout = layoutPlain
			return pos + head
		}
		i.layout = layoutChunked
		return roundUp(pos+head, chunkSize) + chunkSize*i.chunks()
	case unix.S_IFDIR:
		blocks, last := i.dirBlocks(nil)
		i.size = (blocks-1)*blockSize + last
	case unix.S_IFLNK:
		i.size = int64(len(i.Target))
	default:
		i.pos = pos
		return pos + head
	}
	return i.placeTail(pos, head)
}

// placeTail places the last block of an inode's content. If there is room, it is next to the inode
// in the same block.
func (i *inode) placeTail(pos, head int64) int64 {
	full, tail := i.size/blockSize, i.size%blockSize
	if i.IsDir() {
		full, tail = (i.size-1)/blockSize, (i.size-1)%blockSize+1
	}
	if pos%blockSize+head+tail > blockSize && tail <= maxInlineTail && head+tail <= blockSize {
		pos = roundUp(pos, blockSize)
	}
	i.pos = pos
	if tail > 0 && tail < blockSize && pos%blockSize+head+tail <= blockSize {
		i.layout, i.blocks = layoutInline, full
		return pos + head + tail
	}
	i.layout, i.blocks = layoutPlain, roundUp(i.size, blockSize)/blockSize
	return pos + head
}

// chunkBits returns the chunk size of a file. A file is one chunk, unless it has holes or exceeds
// the largest chunk.
func (i *inode) chunkBits() (bits uint8) {
	if len(i.Data.Holes) > 0 {
		return i.Data.ChunkBits
	}
	for bits < maxChunkBits && int64(1)<<bits < i.Data.Blocks() {
		bits++
	}
	return bits
}

func (i *inode) chunks() int64 {
	bits := i.chunkBits()
	return (i.Data.Blocks() + 1<<bits - 1) >> bits
}

// dirBlocks divides the entries of a directory into blocks and calls do, if not nil, with each. It
// returns the number of blocks and the size of the last block.
func (i *inode) dirBlocks(do func(kids []kid)) (blocks, last int64) {
	first := 0
	for n, k := range i.kids {
		size := direntSize + int64(len(k.name))
		if last+size > blockSize {
			if do != nil {
				do(i.kids[first:n])
			}
			first, last = n, 0
			blocks++
		}
		last += size
	}
	if do != nil {
		do(i.kids[first:])
	}
	return blocks + 1, last
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

func xattrSize(list []tree.Xattr) int {
	if len(list) == 0 {
		return 0
	}
	size := xattrHeader
	for _, x := range list {
		_, suffix := xattrName(x.Name)
		size += int(roundUp(int64(xattrEntry+len(suffix)+len(x.Value)), xattrAlign))
	}
	return size
}

func xattrName(name string) (number byte, suffix string) {
	for _, p := range xattrPrefixes {
		if suffix, ok := strings.CutPrefix(name, p.prefix); ok {
			return p.number, suffix
		}
	}
	panic("erofs: an extended attribute that no tree has: " + name)
}

// writer writes forward.
type writer struct {
	out *bufio.Writer
	pos int64
	buf []byte
}

func (w *writer) bytes(b []byte) {
	_, _ = w.out.Write(b) // Flush returns the error of every Write
	w.pos += int64(len(b))
}

var zeros [blockSize]byte

// fill writes zeros up to pos.
func (w *writer) fill(pos int64) {
	for w.pos < pos {
		w.bytes(zeros[:min(pos-w.pos, blockSize)])
	}
}

func (w *writer) align(to int64) { w.fill(roundUp(w.pos, to)) }

// super writes the superblock and the table of devices.
func (w *writer) super(p *plan) {
	le := binary.LittleEndian
	b := make([]byte, roundUp(superOffset+superSize+deviceSize*int64(len(p.devices)), blockSize))
	s := b[superOffset:]
	le.PutUint32(s[0:], superMagic)
	le.PutUint32(s[8:], compatChecked)
	s[12] = blockBits
	le.PutUint16(s[14:], uint16(p.inodes[0].pos/slotSize))
	le.PutUint64(s[16:], uint64(len(p.inodes)))
	le.PutUint32(s[36:], uint32(p.blocks))
	if len(p.devices) > 0 {
		le.PutUint32(s[80:], incompatChunk|incompatDevs)
		le.PutUint16(s[86:], uint16(len(p.devices)))
		le.PutUint16(s[88:], (superOffset+superSize)/deviceSize)
	}
	for n, blocks := range p.devices {
		le.PutUint32(s[superSize+deviceSize*n+64:], uint32(blocks))
	}
	// CRC-32C that begins with all bits set, and is not inverted at the end
	// (erofs_superblock_csum_verify).
	le.PutUint32(s[4:], ^crc32.Checksum(b[superOffset:blockSize], crc32.MakeTable(crc32.Castagnoli)))
	w.bytes(b)
}

// inode writes an inode and its inline data.
func (w *writer) inode(i *inode) {
	w.fill(i.pos)
	le := binary.LittleEndian
	var b [inodeSize]byte
	le.PutUint16(b[0:], extended|i.layout)
	if i.xattrs > 0 {
		le.PutUint16(b[2:], uint16((i.xattrs-xattrHeader)/xattrAlign+1))
	}
	le.PutUint16(b[4:], uint16(i.Mode))
	le.PutUint64(b[8:], uint64(i.size))
	switch i.Type() {
	case unix.S_IFREG:
		if i.layout == layoutChunked {
			le.PutUint16(b[16:], chunkIndexes|uint16(i.chunkBits()))
		}
	case unix.S_IFDIR, unix.S_IFLNK:
		le.PutUint32(b[16:], uint32(i.at))
	case unix.S_IFCHR, unix.S_IFBLK:
		le.PutUint32(b[16:], i.Minor&0xff|i.Major<<8|i.Minor&^0xff<<12) // new_encode_dev
	}
	le.PutUint32(b[20:], i.number)
	le.PutUint32(b[24:], i.UID)
	le.PutUint32(b[28:], i.GID)
	le.PutUint64(b[32:], uint64(i.Sec))
	le.PutUint32(b[40:], i.Nsec)
	le.PutUint32(b[44:], i.links)
	w.bytes(b[:])
	w.xattrs(i)
	switch {
	case i.layout == layoutChunked:
		w.chunks(i)
	case i.layout == layoutInline && i.IsDir():
		n := int64(0)
		i.dirBlocks(func(kids []kid) {
			if n++; n > i.blocks {
				w.dirents(kids)
			}
		})
	case i.layout == layoutInline:
		w.bytes([]byte(i.Target))
	}
}

func (w *writer) xattrs(i *inode) {
	if i.xattrs == 0 {
		return
	}
	w.bytes(zeros[:xattrHeader])
	for _, x := range i.Xattrs {
		number, suffix := xattrName(x.Name)
		w.bytes(binary.LittleEndian.AppendUint16([]byte{byte(len(suffix)), number}, uint16(len(x.Value))))
		w.bytes([]byte(suffix))
		w.bytes([]byte(x.Value))
		w.align(xattrAlign)
	}
}

func (w *writer) chunks(i *inode) {
	w.align(chunkSize)
	bits := i.chunkBits()
	for c := range i.chunks() {
		var b [chunkSize]byte
		block := i.Data.Block + uint32(c<<bits)
		if i.Data.IsHole(c) {
			block = noBlock
		} else {
			binary.LittleEndian.PutUint16(b[2:], uint16(i.Data.Device+1))
		}
		binary.LittleEndian.PutUint32(b[4:], block)
		w.bytes(b[:])
	}
}

// blocks writes the content that is not inline.
func (w *writer) blocks(i *inode) {
	if i.blocks == 0 {
		return
	}
	w.align(blockSize)
	if !i.IsDir() {
		w.bytes([]byte(i.Target))
		return
	}
	n := int64(0)
	i.dirBlocks(func(kids []kid) {
		if n++; n <= i.blocks {
			w.align(blockSize)
			w.dirents(kids)
		}
	})
}

// dirents writes one block of a directory: entries, then names.
func (w *writer) dirents(kids []kid) {
	le := binary.LittleEndian
	b, name := w.buf[:0], direntSize*len(kids)
	for _, k := range kids {
		b = le.AppendUint64(b, uint64(k.to.pos/slotSize))
		b = le.AppendUint16(b, uint16(name))
		b = append(b, fileTypes[k.to.Type()], 0)
		name += len(k.name)
	}
	for _, k := range kids {
		b = append(b, k.name...)
	}
	w.bytes(b)
	w.buf = b
}
