// Package saved reads CRIU's images of saved processes.
//
// # Contract
//
// HighestPID reads the process IDs, for restores into a shared PID namespace. WithoutLinks changes
// the images of mounts, so that CRIU follows no symbolic link in volumes while it opens files
// there. Check refuses processes of an unusual form, as defence in depth.
//
// The package decodes a few fields of each message itself. A launcher uses it, and CRIU's generated
// types would make the start of each launcher slower. It reads regular files of one directory,
// within limits.
package saved
