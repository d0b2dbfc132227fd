// Package criuimages checks what CRIU would do with the images of a checkpoint, where the node's
// own signature says nothing: the container chose a part of their content, and the request of the
// restore may permit less than that of the checkpoint.
//
// # Contract
//
// CRIU opens the files of its images, binds unix sockets and removes old ones as root, below the
// container's root. The container chose the names and, with its writable layer and volumes,
// symbolic links in them. A link to /proc/self/fd leads out of the container: restoring processes
// hold a descriptor of the node's /proc. So CRIU must follow no links. WithoutLinks makes it mount
// everything with the option nosymfollow, except proc filesystems, which CRIU itself needs.
// CheckFiles refuses names with links of a proc filesystem or of the root filesystem. The kernel
// shows names without links. Only the name of a unix socket may have some, such as /var/run.
// CheckFiles follows those of the root filesystem, which nobody else can change.
//
// A process may hold a file open that has no name any more. CRIU stores such a file in its images
// ("ghost"). Before a restore it creates the file beside its old path, before it has entered the
// container's root. CheckFiles refuses such a path unless it has no symbolic link: the file is on
// the root filesystem, below directories without links, or directly in /dev/shm. Other mounts, and
// directories in /dev/shm, are shared with processes that could change them meanwhile.
//
// The kernel shows the number of a thread's seccomp filters to everyone, but their instructions
// only to a tracer. During a restore that is CRIU. So CheckFilters compares the filters in the
// images with those that a launcher would load, before CRIU loads them.
//
// HighestPID reads the same images for restores into a shared PID namespace.
//
// The package decodes a few fields of each message itself. A launcher uses it, and CRIU's generated
// types would make the start of each launcher slower. It reads regular files of one directory,
// within limits.
package criuimages
