package layer

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/safefs"
)

const (
	whiteoutPrefix = ".wh."
	opaqueWhiteout = ".wh..wh..opq"
	aufsPrefix     = ".wh..wh."

	// overlayfs' forms of the same.
	whiteoutDev = 0
	opaqueXattr = "trusted.overlay.opaque"
)

// isAUFS reports whether an entry is one of AUFS' own files, which lie in the
// root of its branches and so in old layers: link counts, orphans, a mark.
func isAUFS(name string) bool {
	return strings.HasPrefix(name, aufsPrefix) && name != opaqueWhiteout
}

// isWhiteout reports whether st is overlayfs' mark for a name that is hidden.
func isWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == whiteoutDev
}

func setOpaque(dir *safefs.Dir) error { return dir.Setxattr("", opaqueXattr, []byte("y")) }

// whiteoutEntry is for an entry named base = ".wh." + hidden in dir.
func (u *unpacker) whiteoutEntry(dir, base, hidden string) error {
	if base != opaqueWhiteout && (hidden == "" || hidden == "." || hidden == "..") {
		return errdefs.InvalidArgument("a whiteout of nothing")
	}
	parent, err := u.parent(dir)
	if err != nil {
		return err
	}
	if base != opaqueWhiteout {
		return u.hide(place{parent, hidden})
	}
	if parent.Path() == "" {
		u.opaque = true // Stack leaves the layers below out: overlayfs takes no such mark on a root
		return nil
	}
	return setOpaque(parent)
}

// hide hides what the layers below have at a place; what this layer has stays.
func (u *unpacker) hide(at place) error {
	if _, ok := u.links[at.path()]; ok {
		return nil
	}
	st, err := at.dir.Stat(at.name)
	switch {
	case errors.Is(err, unix.ENOENT):
		return u.makeWhiteout(at)
	case err != nil:
		return err
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return nil
	}
	d, err := at.dir.Open(at.name)
	if err != nil {
		return err
	}
	defer d.Close()
	delete(u.implied, at.path()) // the one below is gone, its attributes with it
	return setOpaque(d)
}

func (u *unpacker) makeWhiteout(at place) error {
	if err := at.dir.Mknod(at.name, unix.S_IFCHR, whiteoutDev); err != nil {
		return err
	}
	u.whiteouts++
	u.count(0)
	return nil
}

// blocked is called where a directory is implied in whose place is something
// else. A whiteout gives way: the directory then hides what the whiteout hid.
func (u *unpacker) blocked(dir *safefs.Dir, name string, st *unix.Stat_t) error {
	if !isWhiteout(st) {
		return unix.ENOTDIR
	}
	at := place{dir, name}
	u.gone = at.path()
	return u.clear(at, st)
}
