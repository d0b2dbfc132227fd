// Package archive defines the files of a checkpoint and reads and writes them.
//
// # Contract
//
// An archive of a pod is a directory:
//
//	manifest.json                what the archive holds, signed
//	pod.options pod.dump         the pod, in the form of checkpointctl
//	devshm-checkpoint.tar        content of the pod's /dev/shm
//	NAME/                        one directory for each container
//
// An archive of one container has the files of NAME/ beside manifest.json. It is usually a tar
// (Pack). The files of a container are the constants below; package checkpointctl/lib documents
// most of them. The directory checkpoint has CRIU's images, without directories.
//
// To write an archive, a caller creates the files of the containers in an empty directory of its
// own, and Seal adds the rest. The manifest has the size and SHA-256 of every other file. Its
// HMAC-SHA256 uses the node's key, see LoadKey. The manifest gets its name last, so a directory
// with a manifest is complete.
//
// An archive that is read may come from anyone. Import copies it into a directory of the caller
// while it checks everything, so later changes of the original have no effect. Only regular files
// with one link are read, by openat2 below the directory. File names, sizes, counts and the depth
// of JSON are limited. A file that the manifest does not name is an error, and so is a missing one.
// Names, annotations and paths in an archive have no effect outside of it. No path outside the
// archive is opened, and no image is pulled or tagged.
//
// A signature of this node means that this node wrote the archive and nobody changed it. Import
// refuses all other archives.
//
// Errors of reading are InvalidArgument (malformed archive), FailedPrecondition (not signed by this
// node, or a limit of this node), or errors of the filesystem.
package archive
