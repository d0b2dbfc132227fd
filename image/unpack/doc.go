// Package unpack makes a directory tree of the blob of an image's layer: it inflates,
// hashes and reads the tar and writes the files. It is what berth-unpack does, and so all
// that handles bytes of which an image decides alone; it imports little, because it is
// started for every layer.
//
// # Contract
//
// Layer writes below the tree it is given and nowhere else. It needs no more memory for a
// large layer than for a small one, but for names that have to be remembered; they
// are bounded by maxNames and, where they are part of the result, by MaxTold.
//
// It unpacks a tar as extracting it onto the layers below would, with these
// rules where tar, the OCI image-spec ("layer.md") and overlayfs leave room:
//
//   - Every path is resolved inside the layer: absolute names, ".." and symlinks
//     of the same layer never lead out of it. A symlink of a layer below is not
//     known here; an entry below it makes a directory in its place, as in
//     containerd's and docker's overlay drivers.
//   - A whiteout hides what the layers below have, never what its own layer has,
//     whatever their order. Where both exist and the layer's is a directory, that is
//     opaque. So is a directory that takes the place of another type of file.
//   - A char device 0/0, which overlayfs takes for a whiteout and cannot show, is
//     one. No driver answers to that number, so nothing else can be meant.
//   - A later entry replaces an earlier one of the same name; two directories become
//     one with the attributes of the later.
//   - Owners must be 0 to 2^32-2.
//   - Of extended attributes, user.*, security.capability and system.posix_acl_* are
//     kept; trusted.* (overlayfs' own are among them), user.overlay.* and the labels
//     of security modules are for the host to set. They are dropped, as are those
//     that the filesystem does not support.
//   - The names of a file's extended attributes are no longer, together, than Linux lists.
//   - AUFS' own files (.wh..wh.* in the root) are skipped.
//   - The attributes in a hard link's entry are not used: they are its target's.
//
// Pack is for the EROFS driver: it makes the same of a tar, but two files.
//
// # Errors
//
// Those for which somebody is to blame are an *Error, whose code says who: InvalidArgument for
// a tar that is no layer, ResourceExhausted where it exceeds its Limits or the disk is
// full, DataLoss for a blob that cannot be decompressed. Errors of the reader are passed on.
package unpack
