package unpack

import (
	"archive/tar"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/image/tree"
)

// setAttributes gives a node the attributes of its entry as chown, setxattr, chmod and utimensat
// would, in this order. A directory keeps extended attributes of an earlier entry.
func (p *packer) setAttributes(n *tree.Node, hdr *tar.Header) (err error) {
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
		if x.Name == tree.AccessACL {
			n.Xattrs[i].Value = tree.ChmodACL(x.Value, n.Mode)
		}
	}
	return nil
}

// setXattrs sets the extended attributes of an entry that an image may set. If they are too many
// for a tree, the error is OutOfRange, because a filesystem may have room for them.
func (p *packer) setXattrs(n *tree.Node, hdr *tar.Header) error {
	names, err := keptXattrs(hdr)
	if err != nil {
		return err
	}
	for _, name := range names {
		value, ok, err := tree.CheckXattr(n.Type(), name, hdr.PAXRecords[XattrRecord+name])
		if err != nil {
			return fmt.Errorf("extended attribute %q of %d bytes: %w", name, len(hdr.PAXRecords[XattrRecord+name]), err)
		}
		if !ok {
			p.unsupported++
			continue
		}
		if value != nil && len(*value) > tree.MaxXattrValue {
			return &Error{OutOfRange, fmt.Errorf("extended attribute %q has %d bytes, more than the %d allowed", name,
				len(*value), tree.MaxXattrValue)}
		}
		if err := p.keep(tree.XattrMemory + textMemory(name) + textMemory(hdr.PAXRecords[XattrRecord+name])); err != nil {
			return err
		}
		if value != nil {
			value = new(strings.Clone(*value)) // see add
		}
		setXattr(n, strings.Clone(name), value)
	}
	total := 0
	for _, x := range n.Xattrs {
		total += len(x.Name) + len(x.Value)
	}
	if total > tree.MaxXattrBytes || len(n.Xattrs) > tree.MaxXattrs {
		return &Error{OutOfRange, fmt.Errorf("%d extended attributes of %d bytes exceed the limits of %d attributes and %d bytes", len(n.Xattrs), total, tree.MaxXattrs, tree.MaxXattrBytes)}
	}
	return nil
}

// setXattr sets an attribute, or removes it if value is nil.
func setXattr(n *tree.Node, name string, value *string) {
	i, there := slices.BinarySearchFunc(n.Xattrs, name, func(x tree.Xattr,
		name string) int {
		return strings.Compare(x.Name, name)
	})
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
