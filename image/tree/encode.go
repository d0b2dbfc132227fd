package tree

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"golang.org/x/sys/unix"
)

// header begins every tree; the number is the version of the form.
const header = "berth tree 1\n"

// Kinds of nodes. The kind is the first byte of a node. See writer.node for the rest.
const (
	kindDir      = 'd'
	kindFile     = 'f'
	kindSymlink  = 'l'
	kindChar     = 'c'
	kindBlock    = 'b'
	kindFIFO     = 'p'
	kindWhiteout = 'w'
	kindSame     = 'h' // another name of a file before it
	kindBelow    = 'L' // a hard link to a layer below
)

var kinds = map[uint32]byte{
	unix.S_IFDIR: kindDir, unix.S_IFREG: kindFile, unix.S_IFLNK: kindSymlink, unix.S_IFCHR: kindChar,
	unix.S_IFBLK: kindBlock,
	unix.S_IFIFO: kindFIFO,
}

const (
	flagOpaque  = 1
	flagImplied = 2
	flagsKnown  = flagOpaque | flagImplied
)

// Limits of filesystems.
const (
	maxName  = unix.NAME_MAX
	maxPath  = unix.PathMax - 1
	modeBits = 0o7777
	maxMajor = 0xfff
	maxMinor = 0xfffff
	// MaxXattrs limits the extended attributes of a file. With MaxXattrBytes it limits their size
	// in EROFS.
	MaxXattrs = 1 << 12
	// MaxXattrValue is one less than Linux allows, because EROFS stores the length in two bytes.
	MaxXattrValue = 1<<16 - 1
	// MaxXattrBytes limits the names and values of a file's extended attributes, because EROFS
	// stores their size, in words of four bytes, in two bytes.
	MaxXattrBytes = 192 << 10
)

// Limit limits the trees that Decode accepts.
type Limit struct {
	Bytes  int64 // of the encoded tree, which limits the memory for it
	Memory int64 // of the nodes, as Decode counts it
	Blocks int64 // of the data file
}

// Memory of nodes, without their strings, from Decode to the finished image. Writing the image
// takes about as much again (image/erofs: TestMemoryOfMerges). unpack.Pack counts in the same way,
// so that it makes no tree that is too large for Decode.
const (
	NodeMemory  = 448 // with its place in its directory
	DirMemory   = 384 // of a directory besides
	XattrMemory = 64
	// roomy is the longest string whose allocation NodeMemory includes. For a longer string the
	// allocator may waste a quarter.
	roomy = 64
)

// Encode writes a tree, whose root is a directory. Devices are not written.
func Encode(out io.Writer, root *Node) error {
	w := &writer{Writer: bufio.NewWriterSize(out, 64<<10), known: map[*Node]uint64{}}
	_, _ = w.WriteString(header) // Flush returns the error of every Write
	w.node(root)
	return w.Flush()
}

type writer struct {
	*bufio.Writer
	known map[*Node]uint64 // files that are not directories: numbers in the order of the first names
	buf   [binary.MaxVarintLen64]byte
}

func (w *writer) number(list ...uint64) {
	for _, n := range list {
		_, _ = w.Write(binary.AppendUvarint(w.buf[:0], n))
	}
}

func (w *writer) text(s string) {
	w.number(uint64(len(s)))
	_, _ = w.WriteString(s)
}

// node writes one node. The caller has written the node's name, if it has a name.
func (w *writer) node(n *Node) {
	if n.IsWhiteout() {
		_ = w.WriteByte(kindWhiteout)
		return
	}
	if n.IsLink() {
		_ = w.WriteByte(kindBelow)
		w.text(n.Target)
		return
	}
	if number, ok := w.known[n]; ok {
		_ = w.WriteByte(kindSame)
		w.number(number)
		return
	}
	_ = w.WriteByte(kinds[n.Type()])
	w.number(uint64(n.Mode&modeBits), uint64(n.UID), uint64(n.GID))
	_, _ = w.Write(binary.AppendVarint(w.buf[:0], n.Sec))
	w.number(uint64(n.Nsec), uint64(len(n.Xattrs)))
	for _, x := range n.Xattrs {
		w.text(x.Name)
		w.text(x.Value)
	}
	switch n.Type() {
	case unix.S_IFDIR:
		w.directory(n)
		return
	case unix.S_IFREG:
		w.number(uint64(n.Data.Size), uint64(n.Data.Block), uint64(n.Data.ChunkBits))
		w.text(string(n.Data.Holes))
	case unix.S_IFLNK:
		w.text(n.Target)
	case unix.S_IFCHR, unix.S_IFBLK:
		w.number(uint64(n.Major), uint64(n.Minor))
	}
	w.known[n] = uint64(len(w.known))
}

func (w *writer) directory(n *Node) {
	flags := byte(0)
	if n.Opaque {
		flags |= flagOpaque
	}
	if n.Implied {
		flags |= flagImplied
	}
	_ = w.WriteByte(flags)
	for _, name := range n.Names() {
		w.text(name)
		w.node(n.Children[name])
	}
	w.text("") // an empty name marks the end of a directory
}

// ErrMalformed is wrapped by the errors for invalid trees.
var ErrMalformed = errors.New("malformed tree of a layer")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}

// ErrTooLarge is returned by Decode for a tree beyond its Limit.
var ErrTooLarge = errors.New("the tree of a layer is too large")

// Decode reads a tree to its end, with its data in the given device. It returns the tree and the
// memory that it counted.
func Decode(in io.Reader, device int, limit Limit) (_ *Node, memory int64, err error) {
	limited := &io.LimitedReader{R: in, N: limit.Bytes + 1}
	r := &reader{Reader: bufio.NewReaderSize(limited, 64<<10), device: device, limit: limit}
	root, err := r.tree()
	if limited.N <= 0 {
		return nil, r.memory, ErrTooLarge
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, r.memory, malformed("it ends too soon")
	}
	return root, r.memory, err
}

type reader struct {
	*bufio.Reader
	device int
	limit  Limit
	memory int64
	known  []*Node // files that are not directories
}

func (r *reader) tree() (*Node, error) {
	begin := make([]byte, len(header))
	if _, err := io.ReadFull(r, begin); err != nil {
		return nil, err
	}
	if string(begin) != header {
		return nil, malformed("it begins with %q", begin)
	}
	root, err := r.node(0)
	if err != nil {
		return nil, err
	}
	if !root.IsDir() {
		return nil, malformed("its root is no directory")
	}
	if _, err := r.ReadByte(); !errors.Is(err, io.EOF) {
		if err == nil {
			err = malformed("something follows")
		}
		return nil, err
	}
	return root, nil
}

// number reads a number that is at most max.
func (r *reader) number(max uint64) (uint64, error) {
	n, err := binary.ReadUvarint(r)
	if err != nil {
		return 0, numberError(err)
	}
	if n > max {
		return 0, malformed("the number %d where %d is the most", n, max)
	}
	return n, nil
}

// numberError distinguishes the end of the tree from a number that is too long.
func numberError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return malformed("a number: %v", err)
}

func (r *reader) text(max uint64) (string, error) {
	n, err := r.number(max)
	if err != nil {
		return "", err
	}
	if err := r.keep(TextMemory(n)); err != nil {
		return "", err
	}
	buf := make([]byte, n)
	_, err = io.ReadFull(r, buf)
	return string(buf), err
}

// TextMemory returns the memory of a string of n bytes.
func TextMemory(n uint64) uint64 {
	if n > roomy {
		return n + n/4
	}
	return n
}

// keep counts bytes of memory.
func (r *reader) keep(n uint64) error {
	if r.memory += int64(n); r.memory > r.limit.Memory {
		return ErrTooLarge
	}
	return nil
}

// node reads a node. path is the length of its path in bytes.
func (r *reader) node(path int) (*Node, error) {
	if err := r.keep(NodeMemory); err != nil {
		return nil, err
	}
	kind, err := r.ReadByte()
	if err != nil {
		return nil, err
	}
	switch kind {
	case kindWhiteout:
		return &Node{Mode: unix.S_IFCHR}, nil
	case kindBelow:
		target, err := r.text(maxPath)
		return &Node{Target: target}, err
	case kindSame:
		return r.same()
	}
	for mode, k := range kinds {
		if k == kind {
			return r.file(mode, path)
		}
	}
	return nil, malformed("a node of kind %q", kind)
}

func (r *reader) same() (*Node, error) {
	if len(r.known) == 0 {
		return nil, malformed("a second name of nothing")
	}
	number, err := r.number(uint64(len(r.known) - 1))
	if err != nil {
		return nil, err
	}
	return r.known[number], nil
}

// file reads the rest of a node with attributes, after its kind.
func (r *reader) file(mode uint32, path int) (*Node, error) {
	n := &Node{Mode: mode}
	if err := r.attributes(n); err != nil {
		return nil, err
	}
	var err error
	switch mode {
	case unix.S_IFDIR:
		return n, r.directory(n, path)
	case unix.S_IFREG:
		err = r.data(&n.Data)
	case unix.S_IFLNK:
		n.Target, err = r.text(maxPath)
		if err == nil && (n.Target == "" || strings.ContainsRune(n.Target, 0)) {
			err = malformed("a symlink to %q", n.Target)
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		err = r.special(n)
	}
	r.known = append(r.known, n)
	return n, err
}

func (r *reader) attributes(n *Node) error {
	mode, err := r.number(modeBits)
	if err != nil {
		return err
	}
	n.Mode |= uint32(mode)
	for _, id := range []*uint32{&n.UID, &n.GID} {
		number, err := r.number(math.MaxUint32 - 1)
		if err != nil {
			return err
		}
		*id = uint32(number)
	}
	if n.Sec, err = binary.ReadVarint(r); err != nil {
		return numberError(err)
	}
	nsec, err := r.number(999_999_999)
	if err != nil {
		return err
	}
	n.Nsec = uint32(nsec)
	return r.xattrs(n)
}

func (r *reader) xattrs(n *Node) error {
	count, err := r.number(MaxXattrs)
	if err != nil {
		return err
	}
	if err := r.keep(count * XattrMemory); err != nil {
		return err
	}
	if count > 0 {
		n.Xattrs = make([]Xattr, 0, count)
	}
	total, last := 0, ""
	for range count {
		var x Xattr
		if x.Name, err = r.text(maxName); err != nil {
			return err
		}
		if x.Value, err = r.text(MaxXattrValue); err != nil {
			return err
		}
		if x.Name <= last {
			return malformed("the extended attribute %q after %q", x.Name, last)
		}
		// The kernel does not check the attributes in an image. So only attributes that setxattr(2)
		// would store unchanged are accepted.
		if kept, ok, err := CheckXattr(n.Type(), x.Name, x.Value); err != nil || !ok || kept == nil || *kept != x.Value {
			return malformed("the extended attribute %q of %d bytes on a file of type %#o", x.Name, len(x.Value), n.Type())
		}
		last = x.Name
		if total += len(x.Name) + len(x.Value); total > MaxXattrBytes {
			return malformed("extended attributes of more than %d bytes", MaxXattrBytes)
		}
		n.Xattrs = append(n.Xattrs, x)
	}
	return nil
}

func (r *reader) special(n *Node) error {
	major, err := r.number(maxMajor)
	if err != nil {
		return err
	}
	minor, err := r.number(maxMinor)
	if err != nil {
		return err
	}
	n.Major, n.Minor = uint32(major), uint32(minor)
	if n.IsWhiteout() {
		return malformed("a device 0:0")
	}
	return nil
}

func (r *reader) data(d *Data) error {
	size, err := r.number(uint64(r.limit.Blocks) * BlockSize)
	if err != nil {
		return err
	}
	block, err := r.number(math.MaxUint32 - 1)
	if err != nil {
		return err
	}
	bits, err := r.number(31) // even the largest file has fewer blocks
	if err != nil {
		return err
	}
	d.Size, d.Device, d.Block, d.ChunkBits = int64(size), r.device, uint32(block), uint8(bits)
	holes, err := r.text(MaxChunks / 8)
	if err != nil {
		return err
	}
	if int64(d.Block)+d.Blocks() > r.limit.Blocks {
		return malformed("%d bytes at block %d of a data file of %d", d.Size, d.Block, r.limit.Blocks)
	}
	if holes == "" {
		return nil
	}
	d.Holes = []byte(holes)
	if d.ChunkBits != ChunkBitsOf(d.Size) || int64(len(holes)) != (d.Chunks()+7)/8 {
		return malformed("the holes of a file of %d bytes", d.Size)
	}
	return nil
}

func (r *reader) directory(n *Node, path int) error {
	if err := r.keep(DirMemory); err != nil {
		return err
	}
	flags, err := r.ReadByte()
	if err != nil {
		return err
	}
	if flags&^flagsKnown != 0 {
		return malformed("flags %#x", flags)
	}
	n.Opaque, n.Implied = flags&flagOpaque != 0, flags&flagImplied != 0
	n.Children = map[string]*Node{}
	for last := ""; ; {
		name, err := r.text(maxName)
		if err != nil || name == "" {
			return err
		}
		if name <= last || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
			return malformed("the name %q after %q", name, last)
		}
		last = name
		if path+1+len(name) > maxPath+1 {
			return malformed("a path of more than %d bytes", maxPath)
		}
		if n.Children[name], err = r.node(path + 1 + len(name)); err != nil {
			return err
		}
	}
}
