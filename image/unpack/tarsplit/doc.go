// Package tarsplit records the parts of a layer's tar that are not in the stored layer, so that the
// exact tar can be restored. berth keeps no blobs. The tar's digest names the layer in its image.
//
// # Contract
//
// While berth-unpack reads the tar, it writes the record (Recorder). The record has the bytes of
// headers and padding. For the content of each file it has the place in the stored layer. The
// daemon restores any range of the tar from the record and the layer (Reader).
//
// The daemon does not trust the record, because a blob may have compromised berth-unpack. Reader
// limits its memory, and reads only content of the same layer. The bytes that it returns may be
// wrong, which their digest shows.
//
// # Format
//
// The file begins with magic. Blocks follow. Each block is three unsigned varints (uncompressed
// length, compressed length, bytes of the tar) and its compressed data (raw deflate). All blocks
// except the last have at least blockSize bytes, and at most maxBlock. A block contains whole
// operations:
//
//	4n    n bytes              the tar continues with these bytes
//	4n+1                       n zeros, which are most of the headers and padding
//	4n+2  offset+1             n bytes of the data file from an offset
//	4n+2  0 length name        n bytes of the named file from its start
//
// Other runtimes use the format of vbatts/tar-split. Unlike it, this format gives access to any
// range, and refers to content by its place. So it restores a tar that contains a name twice, and
// needs no second parser of the tar.
package tarsplit

import "errors"

const (
	magic = "berth tar 1\n"

	kindBits    = 2 // of an operation's first number
	kindLiteral = 0
	kindZeros   = 1
	kindContent = 2

	blockSize = 128 << 10
	maxName   = 4096                                // PATH_MAX
	maxBlock  = blockSize + 2*literalSize + maxName // the last operations may exceed blockSize
	// literalSize is the maximum number of bytes of one operation.
	literalSize = 64 << 10
)

// Limits of a record. A tar that needs more cannot be restored.
const (
	MaxFile    = 64 << 20 // bytes of the file
	maxLiteral = 1 << 30  // bytes that are not the content of files
	// maxRaw limits all operations. In addition to literals, a block has some bytes for each file.
	maxRaw = maxLiteral + 512<<20
)

// ErrDamaged is wrapped by errors about a record that cannot be decoded.
var ErrDamaged = errors.New("record of the tar is damaged")

// Ref is the place of a file's content in the stored layer.
type Ref struct {
	Offset int64  // in the layer's data file, if Name is empty
	Name   string // path of the file
}
