package inflate

import (
	"bytes"
	"fmt"

	"berth/image/blobindex"
)

// HeadSize is how many bytes Detect needs.
const HeadSize = 10

const (
	gzipMagic = "\x1f\x8b"
	zstdMagic = "\x28\xb5\x2f\xfd"
	// skippableMagic is the magic number of a skippable frame (RFC 8878, section 3.1.2), without
	// its first byte, which is 0x50 to 0x5f. pzstd begins with such a frame.
	skippableMagic = "\x2a\x4d\x18"
)

// unsupported are compressions that other programs read. A tar does not begin with these bytes,
// because they would be the name of a file.
var unsupported = []struct{ name, magic string }{
	{"xz", "\xfd7zXZ\x00"},
	{"lz4", "\x04\x22\x4d\x18"},
	{"compress", "\x1f\x9d"},
	{"zip", "PK\x03\x04"},
}

// A bzip2 begins with bzip2Magic, a digit, and the magic number of a block or of the end.
const (
	bzip2Magic = "BZh"
	bzip2Block = "1AY&SY"
	bzip2Empty = "\x17\x72\x45\x38\x50\x90"
)

// UnsupportedError says that a blob has a compression that berth does not read.
type UnsupportedError struct{ Name string }

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("compressed with %s, which is not supported: compress it with gzip or zstd", e.Name)
}

// Detect returns the compression of a blob that begins with head, which has HeadSize bytes, or is
// the whole blob. It ignores media types and names, because some registries and builders set wrong
// ones. The error is an UnsupportedError.
func Detect(head []byte) (blobindex.Compression, error) {
	switch {
	case begins(head, gzipMagic):
		return blobindex.Gzip, nil
	case begins(head, zstdMagic), len(head) > 0 && head[0]&0xf0 == 0x50 && begins(head[1:], skippableMagic):
		return blobindex.Zstd, nil
	case isBzip2(head):
		return blobindex.None, &UnsupportedError{"bzip2"}
	}
	for _, u := range unsupported {
		if begins(head, u.magic) {
			return blobindex.None, &UnsupportedError{u.name}
		}
	}
	return blobindex.None, nil
}

func isBzip2(head []byte) bool {
	return len(head) == HeadSize && begins(head, bzip2Magic) &&
		(begins(head[4:], bzip2Block) || begins(head[4:], bzip2Empty))
}

func begins(head []byte, magic string) bool { return bytes.HasPrefix(head, []byte(magic)) }
