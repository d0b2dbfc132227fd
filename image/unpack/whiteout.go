package unpack

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"berth/image/unpack/checksum"
	"berth/internal/failpoint"
	"berth/internal/safefs"
)

const (
	whiteoutPrefix = ".wh."
	opaqueWhiteout = ".wh..wh..opq"
	aufsPrefix     = ".wh..wh."

	whiteoutDev = 0 // overlayfs' form of a whiteout

	// OpaqueXattr is overlayfs' mark of an opaque directory.
	OpaqueXattr = "trusted.overlay.opaque"
)

// isAUFS reports whether an entry is a file that AUFS keeps in the root of its branches. Old layers
// contain such files.
func isAUFS(name string) bool {
	return strings.HasPrefix(name, aufsPrefix) && name != opaqueWhiteout
}

// IsWhiteout reports whether st is overlayfs' mark for a name that is hidden.
func IsWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == whiteoutDev
}

// setOpaque records that a directory is opaque. MarkOpaque sets the mark.
func (u *unpacker) setOpaque(path string) error {
	if u.opaques[path] {
		return nil
	}
	u.opaques[path] = true
	return u.remember(len(path))
}

// MarkOpaque sets overlayfs' mark on directories of a tree. That takes CAP_SYS_ADMIN, which
// berth-unpack does not have.
func MarkOpaque(tree *os.File, dirs []Name) error {
	for _, name := range dirs {
		dir, err := safefs.OpenDir(tree, string(name))
		if err != nil {
			return err
		}
		failpoint.Reach("layer.mark-opaque")
		if err := errors.Join(dir.Setxattr("", OpaqueXattr, []byte("y")), dir.Close()); err != nil {
			return err
		}
		failpoint.Reach("layer.marked-opaque")
	}
	return nil
}

// hideAll implements sink.
func (u *unpacker) hideAll(dir *safefs.Dir) error {
	if dir.Path() == "" {
		u.opaque = true // Stack leaves out the layers below, because overlayfs ignores such a mark on a root
		return nil
	}
	return u.setOpaque(dir.Path())
}

// hide implements sink.
func (u *unpacker) hide(at filePlace) error {
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
	delete(u.implied, at.path()) // the directory below is hidden, with its attributes
	return u.setOpaque(at.path())
}

func (u *unpacker) makeWhiteout(at filePlace) error {
	if err := at.dir.Mknod(at.name, unix.S_IFCHR, whiteoutDev); err != nil {
		return err
	}
	u.whiteouts++
	u.count(0)
	u.sum.AddName(at.path(), unix.S_IFCHR)
	u.sum.AddFile(unix.S_IFCHR, 0, 0, whiteoutDev, checksum.Content{})
	return nil
}

// blocked is called if another file is in the place of an implied directory. The directory replaces
// a whiteout and becomes opaque, because the whiteout hid the same files.
func (u *unpacker) blocked(dir *safefs.Dir, name string, st *unix.Stat_t) error {
	if !IsWhiteout(st) {
		return unix.ENOTDIR
	}
	at := filePlace{dir, name}
	u.gone = at.path()
	return u.clear(at, st)
}
