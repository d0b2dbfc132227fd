package unpack

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/safefs"
)

// packedMagic begins the blob of a packed layer: the lengths of tree and data follow, eight bytes each, and then these two.
const packedMagic = "berth packed layer 1\n"

// PackedBlob returns the blob of a Job that is Packed, made of the files that Pack has written, and its length.
func PackedBlob(data, out *os.File) (blob io.Reader, size int64, err error) {
	header := []byte(packedMagic)
	parts := make([]io.Reader, 0, 3)
	for _, f := range []*os.File{out, data} {
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

// readPacked reads a packed layer up to its data, with a tree that takes so much memory at most. Of the tree nothing is believed.
func readPacked(in io.Reader, memory int64) (*tree.Node, error) {
	var header [len(packedMagic) + 16]byte
	if n, err := io.ReadFull(in, header[:]); err == io.EOF {
		return nil, io.ErrUnexpectedEOF
	} else if err != nil {
		return nil, fmt.Errorf("after %d bytes: %w", n, err)
	}
	numbers, ok := bytes.CutPrefix(header[:], []byte(packedMagic))
	if !ok {
		return nil, refuse("it begins with %q", header[:len(packedMagic)])
	}
	treeSize, dataSize := binary.BigEndian.Uint64(numbers), binary.BigEndian.Uint64(numbers[8:])
	if treeSize > uint64(memory) {
		return nil, exceeds("its tree has more than %d bytes", memory)
	}
	limit := tree.Limit{Bytes: int64(treeSize), Memory: memory, Blocks: int64(dataSize / tree.BlockSize)}
	root, _, err := tree.Decode(io.LimitReader(in, int64(treeSize)), 0, limit)
	switch {
	case errors.Is(err, tree.ErrTooLarge):
		return nil, exceeds("its tree takes more than the %d bytes of memory allowed", memory)
	case errors.Is(err, tree.ErrMalformed):
		return nil, &Error{InvalidArgument, err}
	}
	return root, err
}

// packed hands a sink what is in a packed layer, within the limits: what its tar would have come to, whatever the order was in which that
// told it. Files come as their data lies there, for it is read once.
func (w walk[D]) packed(ctx context.Context, in io.Reader, limits Limits) error {
	root, err := readPacked(in, limits.Memory)
	if err != nil {
		return blame(fmt.Errorf("read tree: %w", err))
	}
	r := &replay[D]{walk: w, ctx: ctx, in: in, left: limits.Bytes, most: limits.Entries, known: map[*tree.Node]named{}}
	if err := r.directory("", root); err != nil {
		return err
	}
	slices.SortStableFunc(r.files, func(a, b file) int { return cmp.Compare(a.node.Data.Block, b.node.Data.Block) })
	for _, f := range r.files {
		if err := r.each(f.named, func(at place[D]) error { return r.file(at, f.node) }); err != nil {
			return err
		}
	}
	for _, l := range r.links {
		if err := r.each(l.named, func(at place[D]) error { return r.link(at, l.target) }); err != nil {
			return err
		}
	}
	return nil
}

// replay is a packed layer on its way into a sink.
type replay[D directory] struct {
	walk[D]
	ctx     context.Context
	in      io.Reader            // the data
	pos     int64                // in it
	left    int64                // bytes that the files may still have
	entries int64                // of a tar: for so many names there was one at least
	most    int64                // of these
	known   map[*tree.Node]named // first names of what is no directory
	files   []file               // those with data
	links   []link               // second names
}

// begin begins with a name. Of those that no entry is for, which are directories, the sink has its own bound.
func (r *replay[D]) begin(implied bool) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	if !implied {
		r.entries++
	}
	if r.entries > r.most {
		return exceeds("it has more than the %d entries allowed", r.most)
	}
	r.next()
	return nil
}

// named is a place by the path of its directory.
type named struct{ dir, name string }

func (n named) path() string { return safefs.Join(n.dir, n.name) }

type file struct {
	named
	node *tree.Node
}

type link struct{ named, target named }

// each has something done at a place.
func (r *replay[D]) each(n named, do func(at place[D]) error) error {
	if err := r.begin(false); err != nil {
		return err
	}
	dir, err := r.parent(n.dir)
	if err == nil {
		err = do(place[D]{dir, n.name})
	}
	if err != nil {
		return blame(fmt.Errorf("entry %s: %w", quoted(n.path()), err))
	}
	return nil
}

// directory makes a directory, and what is in it but for files with data and second names.
func (r *replay[D]) directory(path string, n *tree.Node) error {
	if err := r.enter(path, n); err != nil {
		return blame(fmt.Errorf("directory %s: %w", quoted(path), err))
	}
	for _, name := range n.Names() {
		if err := r.entry(named{path, name}, n.Children[name]); err != nil {
			return err
		}
	}
	return nil
}

// enter makes a directory as its entry would, or as implied by what is in it.
func (r *replay[D]) enter(path string, n *tree.Node) error {
	if err := r.begin(n.Implied); err != nil {
		return err
	}
	if n.HandsDown() && len(n.Children) > 0 {
		return &Error{OutOfRange, errors.New("which of its files have inherited its default ACL is not known")}
	}
	if path != "" && !n.Implied {
		dir, name := safefs.Split(path)
		in, err := r.parent(dir)
		if err != nil {
			return err
		}
		if err := r.walk.directory(place[D]{in, name}, headerOf(n)); err != nil {
			return err
		}
	}
	dir, err := r.parent(path)
	if err == nil && path == "" && !n.Implied {
		err = r.listed(dir, headerOf(n))
	}
	if err == nil && n.Opaque {
		err = r.hideAll(dir)
	}
	return err
}

func (r *replay[D]) entry(at named, n *tree.Node) error {
	switch first, again := r.known[n]; {
	case n.IsDir():
		return r.directory(at.path(), n)
	case n.IsWhiteout():
		return r.each(at, r.whiteout)
	case n.IsLink():
		return r.each(at, func(at place[D]) error { return r.linkBelow(at, n.Target) })
	case again:
		r.links = append(r.links, link{at, first})
		return nil
	}
	r.known[n] = at
	switch {
	case n.Type() != unix.S_IFREG:
		return r.each(at, func(at place[D]) error { return r.special(at, headerOf(n), n.Type(), unix.Mkdev(n.Major, n.Minor)) })
	case n.Data.Size == 0:
		return r.each(at, func(at place[D]) error { return r.walk.file(at, headerOf(n), bytes.NewReader(nil)) })
	}
	r.files = append(r.files, file{at, n})
	return nil
}

// file makes a file of the data that comes next.
func (r *replay[D]) file(at place[D], n *tree.Node) error {
	begin := int64(n.Data.Block) * tree.BlockSize
	if begin < r.pos {
		return refuse("its data is in another file's")
	}
	if r.left -= n.Data.Size; r.left < 0 {
		return exceeds("the files are larger than allowed")
	}
	_, err := io.CopyN(io.Discard, r.in, begin-r.pos) // of files that others replaced, and what fills the last block
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	r.pos = begin + n.Data.Size
	return r.walk.file(at, headerOf(n), &exactly{r.in, n.Data.Size})
}

// link gives the file at a place another name.
func (r *replay[D]) link(at place[D], target named) error {
	dir, err := r.lookup(target.dir)
	if err != nil {
		return err
	}
	return r.walk.link(at, place[D]{dir, target.name})
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

// headerOf is the entry that a tar would have for a node.
func headerOf(n *tree.Node) *tar.Header {
	hdr := &tar.Header{
		Mode: int64(n.Mode & ModeBits), Uid: int(n.UID), Gid: int(n.GID), Size: n.Data.Size, Linkname: n.Target,
		ModTime: time.Unix(n.Sec, int64(n.Nsec)), PAXRecords: map[string]string{},
	}
	for _, x := range n.Xattrs {
		hdr.PAXRecords[XattrRecord+x.Name] = x.Value
	}
	if len(n.Data.Holes) > 0 {
		hdr.Typeflag = tar.TypeGNUSparse
	}
	return hdr
}
