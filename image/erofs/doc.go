// Package erofs writes EROFS images with the tree of an image only. The content of files is in data
// files, the image's devices.
//
// # Contract
//
// Write takes a merged tree (tree.Merger) and writes an uncompressed image sequentially. The same
// tree gives the same bytes. The kernel parses only what this package makes of validated names and
// numbers (tree.Decode). The bytes of a layer appear only as names, targets of symlinks and values
// of extended attributes.
//
// Linux mounts an image from a file since 6.12. It uses these features, all of Linux 5.16 or
// earlier: files in chunks and devices (EROFS_FEATURE_INCOMPAT_CHUNKED_FILE, DEVICE_TABLE). The
// format is that of fs/erofs/erofs_fs.h:
//
//	0              nothing, 1024 bytes
//	1024           the superblock, then the table of devices
//	next block     inodes, each with its extended attributes and, as it has place in the inode's block, the target of a
//	               symlink or the last block of a directory; where the data of a file is
//	next block     directories' other blocks, long targets
//
// github.com/erofs/go-erofs 0.3.1 is no replacement: its writer has no hard links, and it merges by
// names of files, not by inodes.
package erofs
