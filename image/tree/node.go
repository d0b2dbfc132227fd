package tree

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"
)

// BlockSize is the block size of data files: each file starts at a block. Every kernel's EROFS
// supports it.
const BlockSize = 4096

// Node is a file of any type. A file with several names is one Node. A Node without a type (Mode is
// 0) is a hard link to a file of a layer below, at the path Target.
type Node struct {
	Mode     uint32 // type and permissions, as in stat(2); a char device 0:0 is a whiteout
	UID, GID uint32
	Sec      int64 // time of modification
	Nsec     uint32
	Major    uint32 // of a device
	Minor    uint32
	Xattrs   []Xattr // sorted by name
	Target   string  // of a symlink, unchanged
	Data     Data    // of a regular file

	Children map[string]*Node // of a directory
	Opaque   bool             // hides the content of the layers below
	Implied  bool             // the layer does not list it, so it has the attributes of the directory below, if any
}

// Xattr is an extended attribute.
type Xattr struct{ Name, Value string }

// Data is the place of a regular file's content: a range of whole blocks in a data file.
type Data struct {
	Size   int64
	Device int    // number of the data file, the argument of Decode
	Block  uint32 // the first block
	// Holes, if not empty, has a bit for each chunk of 1<<ChunkBits blocks, starting with the
	// lowest bit of the first byte. A set bit means that the chunk is all zeros.
	Holes     []byte
	ChunkBits uint8
	Hash      uint64 // of the content, set by the writer; not encoded
}

// MaxChunks limits the chunks of a file with holes.
const MaxChunks = 4096

// Blocks returns the number of blocks in the range.
func (d *Data) Blocks() int64 { return (d.Size + BlockSize - 1) / BlockSize }

// Chunks returns the number of chunks of the file.
func (d *Data) Chunks() int64 {
	return (d.Blocks() + 1<<d.ChunkBits - 1) >> d.ChunkBits
}

// IsHole reports whether a chunk is all zeros.
func (d *Data) IsHole(chunk int64) bool {
	return len(d.Holes) > 0 && d.Holes[chunk/8]&(1<<(chunk%8)) != 0
}

// ChunkBitsOf returns the chunk size for recording the holes of a file.
func ChunkBitsOf(size int64) (bits uint8) {
	for d := (&Data{Size: size}); d.Chunks() > MaxChunks; bits++ {
		d.ChunkBits = bits + 1
	}
	return bits
}

// NewDir returns an empty directory that belongs to root.
func NewDir() *Node { return &Node{Mode: unix.S_IFDIR | 0o755, Children: map[string]*Node{}} }

// Type is the type in Mode, 0 for a link to a layer below.
func (n *Node) Type() uint32 { return n.Mode & unix.S_IFMT }

// IsDir reports whether n is a directory.
func (n *Node) IsDir() bool { return n.Type() == unix.S_IFDIR }

// IsLink reports whether n is a hard link to a layer below.
func (n *Node) IsLink() bool { return n.Mode == 0 }

// IsWhiteout reports whether n hides its name in the layers below.
func (n *Node) IsWhiteout() bool { return n.Type() == unix.S_IFCHR && n.Major == 0 && n.Minor == 0 }

// Names are the names in a directory, sorted.
func (n *Node) Names() []string { return slices.Sorted(maps.Keys(n.Children)) }
