// Package dump copies files to a tar: the writable layer and /dev/shm of a frozen container, and
// directories of images.
//
// # Contract
//
// The tree comes from a container or an image and may be hostile. Nothing outside of the tree is
// read, no symbolic link is followed, and the depth is limited. The result is a tar as podman and
// CRI-O write it: paths are relative, and deleted files are in a separate list. Sparse files stay
// sparse (GNU's PAX format 1.0). Sockets are left out, because no tar can hold them.
package dump
