package tree

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Merger stacks the trees of layers. A Merger with only Pay set is empty.
type Merger struct {
	// Pay is called for each directory on the path of a hard link, and for other work of the same
	// cost. An error ends the merge.
	Pay  func(steps int) error
	root *Node
}

// Root returns the merged tree, without whiteouts, opaque directories and links to layers below. It
// is nil before the first Add.
func (m *Merger) Root() *Node { return m.root }

// Add puts a layer on those added before and takes over its nodes. Errors are about hard links:
// ENOENT if no layer has the target, EISDIR if the target is a directory, and ELOOP after too many
// symlinks.
func (m *Merger) Add(layer *Node) error {
	links := findLinks(layer)
	if err := m.resolveLinks(links, true); err != nil {
		return err
	}
	if m.root == nil {
		settle(layer)
		m.root = layer
	} else {
		if layer.Opaque {
			m.root.Children = map[string]*Node{}
		}
		put(m.root, layer)
	}
	if err := m.resolveLinks(links, false); err != nil {
		return err
	}
	for _, l := range links {
		if err := m.place(l); err != nil {
			return err
		}
	}
	return nil
}

// settle converts a directory of a layer to a directory of the merged tree, if no layer below has
// it. It does so in place, because a copy would take memory.
func settle(dir *Node) {
	dir.Opaque, dir.Implied = false, false
	for name, n := range dir.Children {
		switch {
		case n.IsLink(), n.IsWhiteout(): // a link is placed when its target is known
			delete(dir.Children, name)
		case n.IsDir():
			settle(n)
		}
	}
}

// put merges a directory of a layer into the same directory of the merged tree.
func put(base, top *Node) {
	if !top.Implied {
		base.copyAttributes(top)
	}
	for name, n := range top.Children {
		below := base.Children[name]
		switch {
		case n.IsLink(): // placed when its target is known
		case n.IsWhiteout():
			delete(base.Children, name)
		case n.IsDir() && below != nil && below.IsDir() && !n.Opaque:
			put(below, n)
		case n.IsDir():
			if n.Implied && below != nil && below.IsDir() { // an opaque directory hides the content of the directory below, but not its attributes
				n.copyAttributes(below)
			}
			settle(n)
			base.Children[name] = n
		default:
			base.Children[name] = n
		}
	}
}

// copyAttributes gives a directory the attributes of another.
func (n *Node) copyAttributes(other *Node) {
	n.Mode, n.UID, n.GID, n.Sec, n.Nsec, n.Xattrs = other.Mode, other.UID, other.GID, other.Sec, other.Nsec, other.Xattrs
}

// where is a directory of a layer. Links store a where instead of a path, which may take four
// kilobytes.
type where struct {
	parent *where // nil: the root
	name   string
	node   *Node // in the merged tree, once it was looked up
}

func (w *where) path() string {
	if w.parent == nil {
		return ""
	}
	return w.parent.path() + w.name + "/"
}

// in returns the directory's node in the merged tree. It looks up each directory only once, even if
// it has many links.
func (w *where) in(root *Node) *Node {
	switch {
	case w.node != nil:
	case w.parent == nil:
		w.node = root
	default:
		w.node = w.parent.in(root).Children[w.name]
	}
	return w.node
}

// link is a hard link to a layer below.
type link struct {
	dir    *where
	name   string
	target string
	file   *Node // the link's target
}

func (l *link) failed(err error) error {
	return fmt.Errorf("hard link %q to %q: %w", clip(l.dir.path()+l.name), clip(l.target), err)
}

func clip(name string) string { return name[:min(len(name), 256)] }

// findLinks returns the links of a layer, in the order of its tree.
func findLinks(layer *Node) (links []*link) {
	var walk func(n *Node, dir *where)
	walk = func(n *Node, dir *where) {
		var names []string // only of directories and links, because most children are files
		for name, child := range n.Children {
			if child.IsLink() || child.IsDir() {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		for _, name := range names {
			if child := n.Children[name]; child.IsLink() {
				links = append(links, &link{dir: dir, name: name, target: child.Target})
			} else {
				walk(child, &where{parent: dir, name: name})
			}
		}
	}
	walk(layer, &where{})
	return links
}

// resolveLinks finds the missing targets of links. If retry is set, a missing target is no error.
// The caller looks it up again after it has added the layer. The path may lead through a symlink of
// the layer, or the tar may list the link before the target.
func (m *Merger) resolveLinks(links []*link, retry bool) error {
	for _, l := range links {
		if l.file != nil {
			continue
		}
		n, err := m.resolve(l.target)
		switch {
		case err == nil && n.IsDir():
			return l.failed(unix.EISDIR)
		case err == nil:
			l.file = n
		case retry && isPath(err):
		case errors.Is(err, unix.ENOTDIR):
			return l.failed(unix.ENOENT)
		default:
			return l.failed(err)
		}
	}
	return nil
}

// isPath reports whether an error concerns the path, and is not an error of Pay.
func isPath(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}

const (
	maxSymlinks  = 40 // the kernel's own limit in one resolution (MAXSYMLINKS)
	namesPerStep = 16 // number of path names that can be copied in the time of a step
)

// resolve finds a path as a process with this root would. It follows symlinks, but not one at the
// path's end.
func (m *Merger) resolve(p string) (*Node, error) {
	if m.root == nil {
		return nil, unix.ENOENT
	}
	trail := []*Node{m.root}
	rest := strings.Split(p, "/")
	for links := 0; len(rest) > 0; {
		if err := m.Pay(1); err != nil {
			return nil, err
		}
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			trail = trail[:max(len(trail)-1, 1)]
			continue
		}
		cur := trail[len(trail)-1]
		if !cur.IsDir() {
			return nil, unix.ENOTDIR
		}
		next := cur.Children[name]
		if next == nil {
			return nil, unix.ENOENT
		}
		if next.Type() != unix.S_IFLNK || len(rest) == 0 {
			trail = append(trail, next)
			continue
		}
		if links++; links > maxSymlinks {
			return nil, unix.ELOOP
		}
		if path.IsAbs(next.Target) {
			trail = trail[:1]
		}
		rest = slices.Concat(strings.Split(next.Target, "/"), rest)
		if err := m.Pay(len(rest) / namesPerStep); err != nil { // counts all names, even those that are not followed
			return nil, err
		}
	}
	return trail[len(trail)-1], nil
}

// place adds the name of a link to its file. The link's directory exists, because the layer
// contains it.
func (m *Merger) place(l *link) error {
	if err := m.Pay(1); err != nil {
		return err
	}
	l.dir.in(m.root).Children[l.name] = l.file
	return nil
}
