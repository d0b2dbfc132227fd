package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/image/unpack/packed"
)

// packed hands a sink what is in a packed layer, within the limits: what its tar would have come to, whatever the order was in which that
// told it.
func (w walk[D]) packed(ctx context.Context, in io.Reader, limits Limits) error {
	layer, err := packed.NewReader(in, limits.Memory)
	if err != nil {
		return blamePacked(err)
	}
	r := &replay[D]{walk: w, ctx: ctx, left: limits.Bytes, most: limits.Entries}
	return blamePacked(layer.Each(r.entry))
}

// blamePacked is blame for the errors of a packed layer, too.
func blamePacked(err error) error {
	switch {
	case errors.Is(err, tree.ErrMalformed):
		return &Error{InvalidArgument, err}
	case errors.Is(err, tree.ErrTooLarge):
		return &Error{ResourceExhausted, err}
	}
	return blame(err)
}

// replay is a packed layer on its way into a sink.
type replay[D directory] struct {
	walk[D]
	ctx     context.Context
	left    int64 // bytes that the files may still have
	entries int64 // of a tar: for so many names there was one at least
	most    int64 // of these
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

func (r *replay[D]) entry(e packed.Entry) error {
	if err := r.begin(e.Node.Implied); err != nil {
		return err
	}
	if e.Node.IsDir() {
		if err := r.enter(e.Name, e.Node); err != nil {
			return fmt.Errorf("directory %s: %w", quoted(e.Path()), err)
		}
		return nil
	}
	dir, err := r.parent(e.Dir)
	if err == nil {
		err = r.make(place[D]{dir, e.Name.Name}, e)
	}
	if err != nil {
		return fmt.Errorf("entry %s: %w", quoted(e.Path()), err)
	}
	return nil
}

// enter makes a directory as its entry would, or as implied by what is in it.
func (r *replay[D]) enter(at packed.Name, n *tree.Node) error {
	if n.HandsDown() && len(n.Children) > 0 {
		return &Error{OutOfRange, errors.New("which of its files have inherited its default ACL is not known")}
	}
	path := at.Path()
	if path != "" && !n.Implied {
		in, err := r.parent(at.Dir)
		if err != nil {
			return err
		}
		if err := r.directory(place[D]{in, at.Name}, headerOf(n)); err != nil {
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

// make makes what is no directory.
func (r *replay[D]) make(at place[D], e packed.Entry) error {
	switch n := e.Node; {
	case n.IsWhiteout():
		return r.whiteout(at)
	case n.IsLink():
		return r.linkBelow(at, n.Target)
	case e.First != nil:
		return r.again(at, *e.First)
	case n.Type() != unix.S_IFREG:
		return r.special(at, headerOf(n), n.Type(), unix.Mkdev(n.Major, n.Minor))
	}
	if r.left -= e.Node.Data.Size; r.left < 0 {
		return exceeds("the files are larger than allowed")
	}
	return r.file(at, headerOf(e.Node), e.Content)
}

// again gives the file that came by a name another one.
func (r *replay[D]) again(at place[D], first packed.Name) error {
	dir, err := r.lookup(first.Dir)
	if err != nil {
		return err
	}
	return r.link(at, place[D]{dir, first.Name})
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
