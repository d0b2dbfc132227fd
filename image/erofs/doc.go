// Package erofs writes EROFS images that contain only the tree of an image. The content of files is
// in data files, the image's devices.
//
// # Contract
//
// Write takes a merged tree (tree.Merger) and writes an uncompressed image sequentially. The same
// tree gives the same bytes. The kernel parses only this package's output for validated names and
// numbers (tree.Decode). The bytes of a layer appear only as names, targets of symlinks and values
// of extended attributes.
//
// Linux mounts an image from a file since 6.12. The images use these features, all of Linux 5.16 or
// earlier: files in chunks and devices (EROFS_FEATURE_INCOMPAT_CHUNKED_FILE, DEVICE_TABLE). The
// format is that of fs/erofs/erofs_fs.h:
//
//	0              unused, 1024 bytes
//	1024           the superblock, then the table of devices
//	next block     inodes. Each is followed by its extended attributes, the chunks of a file,
//	               and, if the block has room, a symlink's target or a directory's last block
//	next block     other blocks of directories, long targets
//
// github.com/erofs/go-erofs 0.3.1 is no replacement: its writer has no hard links, and it merges by
// names of files, not by inodes.
package erofs
