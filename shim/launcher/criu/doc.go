// Package criu runs CRIU for dumps and for restores in user namespaces, and reads CRIU's images
// before a restore.
//
// # Contract
//
// A Process is a CRIU that answers requests of one launcher. Start runs CRIU in a separate cgroup,
// and End removes everything of it. StartCommand runs CRIU in the cgroups that the launcher
// chooses.
//
// HighestPID reads the process IDs, for restores into a shared PID namespace. WithoutLinks changes
// the images of mounts, so that CRIU follows no symbolic link in volumes while it opens files
// there. Inside changes the images for a CRIU in the container's own namespaces. Check refuses
// processes of an unusual form, as defence in depth.
//
// The package decodes a few fields of each image itself, because the generated types of CRIU's
// images would make the start of each launcher slower. It reads regular files of one directory,
// within limits.
package criu
