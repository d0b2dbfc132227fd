package unpack

import (
	"archive/tar"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/image/tree"
)

// dress gives a node what its entry says: what chown, setxattr, chmod and utimensat, in this order, would make of it. A directory
// keeps extended attributes that an earlier entry gave it.
func (p *packer) dress(n *tree.Node, hdr *tar.Header) (err error) {
	if n.UID, n.GID, err = owner(hdr); err != nil {
		return err
	}
	n.Sec, n.Nsec = hdr.ModTime.Unix(), uint32(hdr.ModTime.Nanosecond())
	if err := p.setXattrs(n, hdr); err != nil {
		return err
	}
	n.Mode = n.Type() | uint32(hdr.Mode&ModeBits)
	if n.Type() == unix.S_IFLNK {
		n.Mode = unix.S_IFLNK | 0o777
		return nil
	}
	for i, x := range n.Xattrs {
		if x.Name == aclAccess {
			n.Xattrs[i].Value = chmodACL(x.Value, n.Mode)
		}
	}
	return nil
}

const (
	aclAccess  = "system.posix_acl_access"
	aclDefault = "system.posix_acl_default"
	capability = "security.capability"
)

// setXattrs sets the extended attributes of an entry that an image may set.
func (p *packer) setXattrs(n *tree.Node, hdr *tar.Header) error {
	names, err := keptXattrs(hdr)
	if err != nil {
		return err
	}
	for _, name := range names {
		value, ok, err := checkXattr(n.Type(), name, hdr.PAXRecords[XattrRecord+name])
		if err != nil {
			return fmt.Errorf("extended attribute %q of %d bytes: %w", name, len(hdr.PAXRecords[XattrRecord+name]), err)
		}
		if !ok {
			p.unsupported++
			continue
		}
		if err := p.keep(64 + len(name) + len(hdr.PAXRecords[XattrRecord+name])); err != nil {
			return err
		}
		setXattr(n, name, value)
	}
	total := 0
	for _, x := range n.Xattrs {
		total += len(x.Name) + len(x.Value)
	}
	if total > tree.MaxXattrBytes {
		return refuse("extended attributes of %d bytes, more than %d", total, tree.MaxXattrBytes)
	}
	return nil
}

// setXattr sets an attribute, or removes it if it has no value left.
func setXattr(n *tree.Node, name string, value *string) {
	i, there := slices.BinarySearchFunc(n.Xattrs, name, func(x tree.Xattr, name string) int { return strings.Compare(x.Name, name) })
	switch {
	case value == nil && there:
		n.Xattrs = slices.Delete(n.Xattrs, i, i+1)
	case value == nil:
	case there:
		n.Xattrs[i].Value = *value
	default:
		n.Xattrs = slices.Insert(n.Xattrs, i, tree.Xattr{Name: name, Value: *value})
	}
}

// checkXattr does what the kernel does with an attribute that is set on a file of a type: it refuses it, has no place for it (ok is
// false), or keeps a value.
func checkXattr(mode uint32, name, value string) (kept *string, ok bool, err error) {
	switch {
	case len(name) > unix.NAME_MAX:
		return nil, false, unix.ERANGE
	case len(value) > tree.MaxXattrValue:
		return nil, false, unix.E2BIG
	case name == aclAccess || name == aclDefault:
		return checkACL(mode, name, value)
	case name == capability:
		return &value, true, checkCapability(value)
	case !tree.KnownXattr(name):
		return nil, false, unix.EINVAL
	case mode != unix.S_IFREG && mode != unix.S_IFDIR:
		return nil, false, nil // user.* is for files and directories only, xattr(7)
	}
	return &value, true, nil
}

// checkCapability refuses what cap_convert_nscap does: anything but versions 2 and 3 of struct vfs_cap_data.
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

// Tags of the entries of an ACL (linux/posix_acl.h), and the form of both (linux/posix_acl_xattr.h).
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
		list = append(list, aclEntry{binary.LittleEndian.Uint16(e), binary.LittleEndian.Uint16(e[2:]), binary.LittleEndian.Uint32(e[4:])})
	}
	return list
}

// checkACL is checkXattr for ACLs: posix_acl_from_xattr, posix_acl_valid and posix_acl_equiv_mode.
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
	case name == aclDefault && mode != unix.S_IFDIR:
		return nil, false, unix.EACCES
	case name == aclAccess && !more:
		return nil, true, nil // it says what the mode says
	}
	return &value, true, nil
}

// validACL checks the order of the entries, and reports whether they say more than a mode does.
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

// chmodACL is what chmod(2) makes of an access ACL.
func chmodACL(value string, mode uint32) string {
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
