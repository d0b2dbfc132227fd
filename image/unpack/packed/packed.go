// Package packed is the blob of a layer that was packed: its tree, and the data of its files (see package tree).
//
// # Contract
//
// Blob makes the blob of the two files that the layer was packed into. A Reader reads it once, from its beginning to its end, keeps no more of
// it than the tree, within the memory allowed, and believes nothing: a blob that cannot have been packed is an error that wraps tree.ErrMalformed, a tree
// beyond its limit one that wraps tree.ErrTooLarge, a blob that ends too early io.ErrUnexpectedEOF.
package packed

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/safefs"
)

// magic begins the blob: the lengths of tree and data follow, eight bytes each, and then these two.
const magic = "berth packed layer 1\n"

// Blob returns the blob of a layer whose data and tree are in these files, and its length.
func Blob(data, tree *os.File) (blob io.Reader, size int64, err error) {
	header := []byte(magic)
	parts := make([]io.Reader, 0, 3)
	for _, f := range []*os.File{tree, data} {
		st, err := f.Stat()
		if err != nil {
			return nil, 0, err
		}
		header = binary.BigEndian.AppendUint64(header, uint64(st.Size()))
		size += st.Size()
		parts = append(parts, io.NewSectionReader(f, 0, st.Size()))
	}
	parts = slices.Insert(parts, 0, io.Reader(bytes.NewReader(header)))
	return io.MultiReader(parts...), size + int64(len(header)), nil
}

// Reader reads a packed layer.
type Reader struct {
	root  *tree.Node
	in    io.Reader // the data
	pos   int64     // in it
	known map[*tree.Node]Name
	files []Entry // those with data
	links []Entry // second names
}

// NewReader reads the tree of a packed layer, which takes so many bytes of memory at most.
func NewReader(in io.Reader, memory int64) (*Reader, error) {
	root, err := readTree(in, memory)
	if err != nil {
		return nil, fmt.Errorf("read tree: %w", err)
	}
	return &Reader{root: root, in: in, known: map[*tree.Node]Name{}}, nil
}

func readTree(in io.Reader, memory int64) (*tree.Node, error) {
	var header [len(magic) + 16]byte
	if n, err := io.ReadFull(in, header[:]); err == io.EOF {
		return nil, io.ErrUnexpectedEOF
	} else if err != nil {
		return nil, fmt.Errorf("after %d bytes: %w", n, err)
	}
	numbers, ok := bytes.CutPrefix(header[:], []byte(magic))
	if !ok {
		return nil, fmt.Errorf("%w: it begins with %q", tree.ErrMalformed, header[:len(magic)])
	}
	treeSize, dataSize := binary.BigEndian.Uint64(numbers), binary.BigEndian.Uint64(numbers[8:])
	if treeSize > uint64(memory) {
		return nil, fmt.Errorf("%w: it has more than %d bytes", tree.ErrTooLarge, memory)
	}
	limit := tree.Limit{Bytes: int64(treeSize), Memory: memory, Blocks: int64(dataSize / tree.BlockSize)}
	root, _, err := tree.Decode(io.LimitReader(in, int64(treeSize)), 0, limit)
	if errors.Is(err, tree.ErrTooLarge) {
		return nil, fmt.Errorf("%w: it takes more than the %d bytes of memory allowed", err, memory)
	}
	return root, err
}

// Name is a name in a directory, whose path is Dir.
type Name struct{ Dir, Name string }

// Path is that of what has the name.
func (n Name) Path() string { return safefs.Join(n.Dir, n.Name) }

// Entry is one of the names in a packed layer; the root's is empty.
type Entry struct {
	Name
	Node *tree.Node
	// First is the name that came first of a Node with several, nil for that one.
	First *Name
	// Content is that of a regular file with its first name. It is good until the next Entry.
	Content io.Reader
}

// Each has something done for each entry, one after the other, until that fails: a directory before what is in it; files as their data lies there, for it is
// read once, and so after all that has none; second names at the end. It may be called once.
func (r *Reader) Each(do func(Entry) error) error {
	if err := r.directory(Name{}, r.root, do); err != nil {
		return err
	}
	slices.SortStableFunc(r.files, func(a, b Entry) int { return cmp.Compare(a.Node.Data.Block, b.Node.Data.Block) })
	for _, f := range r.files {
		if err := r.seek(&f); err != nil {
			return fmt.Errorf("data of %.256q: %w", f.Path(), err)
		}
		if err := do(f); err != nil {
			return err
		}
	}
	for _, l := range r.links {
		if err := do(l); err != nil {
			return err
		}
	}
	return nil
}

// directory is for one, and what is in it but for files with data and second names.
func (r *Reader) directory(at Name, n *tree.Node, do func(Entry) error) error {
	if err := do(Entry{Name: at, Node: n}); err != nil {
		return err
	}
	for _, name := range n.Names() {
		if err := r.entry(Entry{Name: Name{at.Path(), name}, Node: n.Children[name]}, do); err != nil {
			return err
		}
	}
	return nil
}

func (r *Reader) entry(e Entry, do func(Entry) error) error {
	switch first, again := r.known[e.Node]; {
	case e.Node.IsDir():
		return r.directory(e.Name, e.Node, do)
	case e.Node.IsWhiteout(), e.Node.IsLink():
		return do(e)
	case again:
		e.First = &first
		r.links = append(r.links, e)
		return nil
	}
	r.known[e.Node] = e.Name
	if e.Node.Type() == unix.S_IFREG {
		if e.Node.Data.Size > 0 {
			r.files = append(r.files, e)
			return nil
		}
		e.Content = bytes.NewReader(nil)
	}
	return do(e)
}

// seek goes to the data of a file.
func (r *Reader) seek(f *Entry) error {
	begin := int64(f.Node.Data.Block) * tree.BlockSize
	if begin < r.pos {
		return fmt.Errorf("%w: it is in another file's", tree.ErrMalformed)
	}
	_, err := io.CopyN(io.Discard, r.in, begin-r.pos) // of files that others replaced, and what fills the last block
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	r.pos = begin + f.Node.Data.Size
	f.Content = &exactly{r.in, f.Node.Data.Size}
	return nil
}

// exactly reads so many bytes, of which none may lack.
type exactly struct {
	in   io.Reader
	left int64
}

func (e *exactly) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	n, err := e.in.Read(p[:min(int64(len(p)), e.left)])
	if e.left -= int64(n); e.left > 0 && err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}
