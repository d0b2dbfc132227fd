package tree

import (
	"encoding/binary"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// AccessACL is the attribute with the permissions that do not fit into the mode.
	AccessACL = "system.posix_acl_access"
	// DefaultACL is the attribute with the ACL that new files in a directory inherit.
	DefaultACL = "system.posix_acl_default"
	capability = "security.capability"

	maxLinuxXattr = 64 << 10 // XATTR_SIZE_MAX (linux/limits.h)
)

// knownXattr reports whether a tree may have the attribute. An image must be allowed to set it
// (unpack.KeepXattr), and EROFS must be able to store it. overlayfs' own attributes are excluded.
func knownXattr(name string) bool {
	user, ok := strings.CutPrefix(name, "user.")
	switch {
	case strings.ContainsRune(name, 0):
		return false
	case ok:
		return user != "" && !strings.HasPrefix(user, "overlay.")
	}
	return name == capability || name == AccessACL || name == DefaultACL
}

// CheckXattr applies Linux's rules for setting an attribute on a file of a type (the S_IFMT bits of
// mode). Linux may reject the attribute (an error), not support it (ok is false), or keep a value,
// which may be empty. A kept value may be longer than MaxXattrValue.
func CheckXattr(mode uint32, name, value string) (kept *string, ok bool, err error) {
	switch {
	case len(name) > unix.NAME_MAX:
		return nil, false, unix.ERANGE
	case len(value) > maxLinuxXattr:
		return nil, false, unix.E2BIG
	case name == AccessACL || name == DefaultACL:
		return checkACL(mode, name, value)
	case name == capability:
		return &value, true, checkCapability(value)
	case !knownXattr(name):
		return nil, false, unix.EINVAL
	case mode != unix.S_IFREG && mode != unix.S_IFDIR:
		return nil, false, nil // user.* is for files and directories only, xattr(7)
	}
	return &value, true, nil
}

// checkCapability rejects the same values as cap_convert_nscap: everything except versions 2 and 3
// of struct vfs_cap_data.
func checkCapability(value string) error {
	const (
		size2, revision2 = 20, 0x02000000
		size3, revision3 = 24, 0x03000000
		revisionMask     = 0xff000000
	)
	if len(value) == size2 || len(value) == size3 {
		switch revision := binary.LittleEndian.Uint32([]byte(value)) & revisionMask; {
		case len(value) == size2 && revision == revision2, len(value) == size3 && revision == revision3:
			return nil
		}
	}
	return unix.EINVAL
}

// Tags of the entries of an ACL (linux/posix_acl.h), and their format (linux/posix_acl_xattr.h).
const (
	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20

	aclVersion    = 2
	aclHeaderSize = 4
	aclEntrySize  = 8
)

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

func aclEntries(value string) (list []aclEntry) {
	for e := range slices.Chunk([]byte(value[aclHeaderSize:]), aclEntrySize) {
		list = append(list, aclEntry{
			tag:  binary.LittleEndian.Uint16(e),
			perm: binary.LittleEndian.Uint16(e[2:]),
			id:   binary.LittleEndian.Uint32(e[4:]),
		})
	}
	return list
}

// checkACL is CheckXattr for ACLs. It does what posix_acl_from_xattr, posix_acl_valid and
// posix_acl_equiv_mode of Linux do.
func checkACL(mode uint32, name, value string) (kept *string, ok bool, err error) {
	switch {
	case mode == unix.S_IFLNK:
		return nil, false, nil
	case len(value) < aclHeaderSize:
		return nil, false, unix.EINVAL
	case binary.LittleEndian.Uint32([]byte(value)) != aclVersion:
		return nil, false, nil // EOPNOTSUPP
	case (len(value)-aclHeaderSize)%aclEntrySize != 0:
		return nil, false, unix.EINVAL
	}
	list := aclEntries(value)
	if len(list) == 0 {
		return nil, true, nil
	}
	more, err := validACL(list)
	switch {
	case err != nil:
		return nil, false, err
	case name == DefaultACL && mode != unix.S_IFDIR:
		return nil, false, unix.EACCES
	case name == AccessACL && !more:
		return nil, true, nil // equivalent to the mode
	}
	return &value, true, nil
}

// validACL checks the order of the entries, and reports whether they contain more than a mode.
func validACL(list []aclEntry) (more bool, err error) {
	next, needsMask := uint16(aclUserObj), false
	for _, e := range list {
		if e.perm&^0o7 != 0 {
			return false, unix.EINVAL
		}
		if (e.tag == aclUser || e.tag == aclGroup) && e.id == ^uint32(0) {
			return false, unix.EINVAL
		}
		switch {
		case e.tag == aclUserObj && next == aclUserObj:
			next = aclUser
		case e.tag == aclUser && next == aclUser:
			needsMask = true
		case e.tag == aclGroupObj && next == aclUser:
			next = aclGroup
		case e.tag == aclGroup && next == aclGroup:
			needsMask = true
		case e.tag == aclMask && next == aclGroup:
			next, more = aclOther, true
		case e.tag == aclOther && (next == aclOther || next == aclGroup && !needsMask):
			next = 0
		default:
			return false, unix.EINVAL
		}
	}
	if next != 0 {
		return false, unix.EINVAL
	}
	return more, nil
}

// ChmodACL returns the access ACL after chmod(2) with a mode.
func ChmodACL(value string, mode uint32) string {
	b := []byte(value)
	hasMask := slices.ContainsFunc(aclEntries(value), func(e aclEntry) bool { return e.tag == aclMask })
	for e := range slices.Chunk(b[aclHeaderSize:], aclEntrySize) {
		shift := -1
		switch tag := binary.LittleEndian.Uint16(e); {
		case tag == aclUserObj:
			shift = 6
		case tag == aclMask, tag == aclGroupObj && !hasMask:
			shift = 3
		case tag == aclOther:
			shift = 0
		}
		if shift >= 0 {
			binary.LittleEndian.PutUint16(e[2:], uint16(mode>>shift&0o7))
		}
	}
	return string(b)
}
