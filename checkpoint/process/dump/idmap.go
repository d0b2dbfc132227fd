package dump

import (
	"encoding/binary"
	"slices"
	"strings"

	"berth/internal/userns"
)

// The kernel's formats of extended attributes with IDs: struct vfs_ns_cap_data (linux/capability.h)
// and struct posix_acl_xattr_header (linux/posix_acl_xattr.h).
const (
	capabilitySize   = 20 // revision 2, which is for the node's root
	nsCapabilitySize = 24 // revision 3: with the ID of a namespace's root at its end
	revisionAt       = 3
	nsRevision       = 3

	aclHeader = 4
	aclEntry  = 8 // tag, permissions (2 bytes each) and ID
	aclUser   = 2
	aclGroup  = 8
)

// mapAttribute replaces the IDs in the value of an extended attribute by host IDs. The kernel does
// the same for a file on an ID-mapped mount.
func mapAttribute(attr string, value []byte, m *userns.Mappings) []byte {
	value = slices.Clone(value)
	switch {
	case attr == "security.capability":
		return mapCapability(value, m)
	case strings.HasPrefix(attr, "system.posix_acl_"):
		mapACL(value, m)
	}
	return value
}

func mapCapability(value []byte, m *userns.Mappings) []byte {
	if len(value) == capabilitySize {
		value = append(value, 0, 0, 0, 0)
		value[revisionAt] = nsRevision
	}
	if len(value) == nsCapabilitySize {
		root := value[capabilitySize:]
		binary.LittleEndian.PutUint32(root, uint32(m.HostUID(binary.LittleEndian.Uint32(root))))
	}
	return value
}

func mapACL(value []byte, m *userns.Mappings) {
	for at := aclHeader; at+aclEntry <= len(value); at += aclEntry {
		id := value[at+4 : at+aclEntry]
		switch binary.LittleEndian.Uint16(value[at:]) {
		case aclUser:
			binary.LittleEndian.PutUint32(id, uint32(m.HostUID(binary.LittleEndian.Uint32(id))))
		case aclGroup:
			binary.LittleEndian.PutUint32(id, uint32(m.HostGID(binary.LittleEndian.Uint32(id))))
		}
	}
}
