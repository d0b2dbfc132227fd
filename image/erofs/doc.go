// Package erofs writes EROFS images that hold the tree of an image and nothing else: the data of its files is in data files, the
// image's devices.
//
// # Contract
//
// Write takes a merged tree (tree.Merger) and writes an uncompressed image, strictly forward: the same tree gives the same
// bytes. What the kernel parses of it is made here, of names and numbers that were checked (tree.Decode); no byte of it
// comes from elsewhere but names, the targets of symlinks and the values of extended attributes.
//
// Linux mounts the image from a file since 6.12. Features that it needs, all of Linux 5.16 or earlier: files in chunks,
// and devices (EROFS_FEATURE_INCOMPAT_CHUNKED_FILE, DEVICE_TABLE). The form is that of fs/erofs/erofs_fs.h:
//
//	0              nothing, 1024 bytes
//	1024           the superblock, then the table of devices
//	next block     inodes, each with its extended attributes and, as it has place in the inode's block, the target of a
//	               symlink or the last block of a directory; where the data of a file is
//	next block     directories' other blocks, long targets
//
// github.com/erofs/go-erofs was looked at (0.3.1): its writer has no hard links, and merges by names of files, not of inodes.
package erofs
