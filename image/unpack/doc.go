// Package unpack makes a directory tree from the blob of an image layer. It decompresses, hashes
// and parses the tar, and writes the files. It contains all code that handles an image's bytes,
// because berth-unpack runs it. It has few imports, because berth-unpack is started for every
// layer.
//
// # Contract
//
// Layer writes below the given tree and nowhere else. Its memory does not depend on the size of the
// layer, except for names that it has to remember. maxNames limits these names, and MaxTold limits
// the names that are part of the result.
//
// The result equals that of extracting the tar onto the layers below. Where the tar format, the OCI
// image-spec ("layer.md") and overlayfs leave a choice, these rules apply:
//
//   - Every path is resolved inside the layer: absolute names, ".." and symlinks
//     of the same layer never lead out of it. Symlinks of a layer below are unknown here. An entry
//     below such a symlink creates a directory in its place, as in containerd's and docker's
//     overlay drivers.
//   - A whiteout hides entries of the layers below, never those of its own layer,
//     regardless of their order. A directory that has a whiteout in the same layer is opaque. So is
//     a directory that replaces another type of file.
//   - A character device 0/0 is a whiteout, because overlayfs could not show it, and no driver has
//     that number.
//   - A later entry replaces an earlier one of the same name. Two directories become
//     one with the attributes of the later.
//   - Owners must be 0 to 2^32-2.
//   - The extended attributes user.*, security.capability and system.posix_acl_* are
//     kept. Others are dropped, because the host sets them: trusted.* (with
//     overlayfs' own), user.overlay.* and the labels of security modules. Attributes
//     that the filesystem does not support are dropped as well.
//   - The names of a file's extended attributes must fit into Linux's list.
//   - AUFS' own files (.wh..wh.* in the root) are skipped.
//   - The attributes in a hard link's entry are ignored, because its target has the attributes. A
//     hard link of a directory to itself is ignored.
//
// Pack does the same for the EROFS driver and writes two files.
//
// # Errors
//
// Errors with a known cause are an *Error with a code. It is InvalidArgument for a tar that is no
// valid layer, and FailedPrecondition if it exceeds its Limits. It is ResourceExhausted if the disk
// is full, and DataLoss for a blob that cannot be decompressed. Errors of the reader are returned
// as they are.
package unpack
