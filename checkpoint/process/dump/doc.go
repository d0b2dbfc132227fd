// Package dump copies files to a tar: the writable layer and /dev/shm of a frozen container, and
// directories of images.
//
// # Contract
//
// The tree comes from a container or an image and may be hostile. Nothing outside of it is read, no
// symbolic link is followed, and the depth is limited. The result is a tar in the form that podman
// and CRI-O write: paths are relative, deleted files are in a list of their own. Sparse files stay
// sparse (GNU's PAX format 1.0). Sockets are left out, because no tar can hold them.
package dump
