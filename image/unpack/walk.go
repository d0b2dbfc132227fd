package unpack

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/safefs"
)

// sink creates the entries of a tar in a layer, as files or as a packed tree. D is the type of its
// directories. It gets the entries one after the other, and may return an error for any entry.
type sink[D directory] interface {
	// next is called when the previous entry is complete.
	next()

	// parent returns the directory at a path, through symlinks of the layer, and creates missing
	// directories.
	parent(path string) (D, error)
	// lookup returns the directory if it exists, otherwise ENOENT or ENOTDIR.
	lookup(path string) (D, error)
	// listed gives a directory the attributes in its entry.
	listed(dir D, hdr *tar.Header) error

	// The following methods replace an existing file at the place, except that a directory stays a
	// directory.
	directory(at place[D], hdr *tar.Header) error
	file(at place[D], hdr *tar.Header, content io.Reader) error
	special(at place[D], hdr *tar.Header, mode uint32, dev uint64) error // symlinks, devices, FIFOs
	whiteout(at place[D]) error
	link(at, target place[D]) error             // a hard link to something that is no directory
	linkBelow(at place[D], target string) error // a hard link to a file of a layer below

	// hide hides the entry of the layers below at a place, and hideAll all entries of a directory.
	// Entries of this layer stay.
	hide(at place[D]) error
	hideAll(dir D) error

	// target returns the target of a hard link. For a file in this layer it returns the type
	// (S_IFMT). For a file in a layer below it returns the path.
	target(at place[D]) (mode uint32, below string, err error)

	// finish returns the result when there are no more entries.
	finish(ctx context.Context) (Contents, error)
	close()
}

// directory is a directory in a layer. Its path contains no symlinks.
type directory interface{ Path() string }

// place is where an entry goes.
type place[D directory] struct {
	dir  D
	name string
}

// path is free of symlinks.
func (p place[D]) path() string { return safefs.Join(p.dir.Path(), p.name) }

// walk passes the entries of a tar to a sink. It implements the rules of the package documentation
// for all forms of layers.
type walk[D directory] struct{ sink[D] }

// all walks over the archive to its end, within the limits.
func (w walk[D]) all(ctx context.Context, tr *tar.Reader, limits Limits) error {
	var entries, content int64
	for {
		hdr, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // such paths are confined
			return blame(fmt.Errorf("read tar after %d entries: %w", entries, err))
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if entries++; entries > limits.Entries {
			return exceeds("it has more than the %d entries allowed", limits.Entries)
		}
		if content += contentSize(hdr, limits.Bytes); content > limits.Bytes {
			return exceeds("its files are larger than the %d bytes allowed", limits.Bytes)
		}
		if err := w.entry(hdr, tr); err != nil {
			return blame(fmt.Errorf("entry %s: %w", quoted(hdr.Name), err))
		}
	}
}

// quoted shortens a name for an error.
func quoted(name string) string {
	const most = 256
	if len(name) > most {
		return strconv.Quote(name[:most]) + "…"
	}
	return strconv.Quote(name)
}

// contentSize returns the size of a file with its holes, or a number above max if it is larger.
// Entries of other types may claim a size and have none.
func contentSize(hdr *tar.Header, max int64) int64 {
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return min(hdr.Size, max+1)
	}
	return 0
}

// entry handles one entry of the tar.
func (w walk[D]) entry(hdr *tar.Header, content io.Reader) error {
	w.next()
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil // comments, such as git's commit id
	}
	name := safefs.Clean(hdr.Name)
	if len(name) > maxPath {
		return unix.ENAMETOOLONG
	}
	if name != "" && isAUFS(name) {
		return nil
	}
	dir, base := safefs.Split(name)
	hidden, isWhiteout := strings.CutPrefix(base, whiteoutPrefix)
	isOpaque := base == opaqueWhiteout
	switch {
	case name == "" && hdr.Typeflag == tar.TypeLink && safefs.Clean(hdr.Linkname) == "":
		return nil // kaniko links the root to itself (kaniko#1151)
	case name == "" && hdr.Typeflag != tar.TypeDir:
		return refuse("the root is no directory")
	case isWhiteout && !isOpaque && (hidden == "" || hidden == "." || hidden == ".."):
		return refuse("a whiteout of nothing")
	}
	parent, err := w.parent(dir)
	if err != nil {
		return err
	}
	switch {
	case name == "":
		return w.listed(parent, hdr)
	case isOpaque:
		return w.hideAll(parent)
	case isWhiteout:
		base = hidden
	}
	at := place[D]{parent, base}
	if err := checkName(at.path(), base); err != nil {
		return err
	}
	if isWhiteout {
		return w.hide(at)
	}
	return w.make(at, hdr, content)
}

// checkName fails as the kernel does.
func checkName(path, name string) error {
	if len(name) > unix.NAME_MAX || len(path) > maxPath {
		return unix.ENAMETOOLONG
	}
	if strings.ContainsRune(name, 0) {
		return unix.EINVAL
	}
	return nil
}

// make creates an entry according to its type.
func (w walk[D]) make(at place[D], hdr *tar.Header, content io.Reader) error {
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return w.file(at, hdr, content)
	case tar.TypeDir:
		return w.directory(at, hdr)
	case tar.TypeSymlink:
		return w.symlink(at, hdr)
	case tar.TypeLink:
		return w.hardlink(at, hdr)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return w.node(at, hdr)
	}
	return refuse("unknown type %q", hdr.Typeflag)
}

func (w walk[D]) symlink(at place[D], hdr *tar.Header) error {
	switch {
	case hdr.Linkname == "":
		return refuse("a symlink without a target")
	case len(hdr.Linkname) > maxPath:
		return unix.ENAMETOOLONG
	case strings.ContainsRune(hdr.Linkname, 0):
		return unix.EINVAL
	}
	return w.special(at, hdr, unix.S_IFLNK, 0)
}

// hardlink creates a hard link to a file of the layer. It records a hard link to a file of a layer
// below.
func (w walk[D]) hardlink(at place[D], hdr *tar.Header) error {
	target := safefs.Clean(hdr.Linkname)
	if target == "" || len(target) > maxPath || strings.ContainsRune(target, 0) {
		return refuse("a hard link to %q", hdr.Linkname)
	}
	dir, base := safefs.Split(target)
	if len(base) > unix.NAME_MAX {
		return unix.ENAMETOOLONG
	}
	in, err := w.lookup(dir)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return w.linkBelow(at, target)
	}
	if err != nil {
		return err
	}
	to := place[D]{in, base}
	mode, below, err := w.target(to)
	switch {
	case err != nil:
		return err
	case below != "":
		return w.linkBelow(at, below)
	case mode == unix.S_IFDIR && to.path() == at.path():
		return nil // this is like a link of the root to itself
	case mode == unix.S_IFDIR:
		return refuse("a hard link to the directory %q", hdr.Linkname)
	}
	return w.link(at, to)
}

// node creates devices and FIFOs.
func (w walk[D]) node(at place[D], hdr *tar.Header) error {
	// The kernel would cut larger numbers, because MINORBITS is 20.
	if hdr.Devmajor < 0 || hdr.Devmajor > 0xfff || hdr.Devminor < 0 || hdr.Devminor > 0xfffff {
		return refuse("device number %d:%d", hdr.Devmajor, hdr.Devminor)
	}
	dev := unix.Mkdev(uint32(hdr.Devmajor), uint32(hdr.Devminor))
	switch hdr.Typeflag {
	case tar.TypeFifo:
		return w.special(at, hdr, unix.S_IFIFO, 0)
	case tar.TypeBlock:
		return w.special(at, hdr, unix.S_IFBLK, dev)
	}
	if dev == whiteoutDev {
		return w.whiteout(at)
	}
	return w.special(at, hdr, unix.S_IFCHR, dev)
}

// isSparse reports whether the entry is in one of GNU tar's four sparse forms.
func isSparse(hdr *tar.Header) bool {
	if hdr.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range hdr.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// eachBlock calls write for the blocks of a file that are not all zero, because archive/tar expands
// holes. A block has at most copySize bytes. It calls tick periodically, because a hole takes time
// but no bytes of the tar.
func eachBlock(in io.Reader, size int64, buf []byte, block int, tick func(),
	write func(block []byte, offset int64) error) error {
	for offset := int64(0); ; {
		n, err := io.ReadFull(in, buf)
		tick()
		for rest := buf[:n]; len(rest) > 0; {
			b := rest[:min(block, len(rest))]
			if !isZero(b) {
				if err := write(b, offset); err != nil {
					return err
				}
			}
			offset, rest = offset+int64(len(b)), rest[len(b):]
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF && offset == size {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

var zeros [copySize]byte

// isZero reports whether all bytes are zero.
func isZero(b []byte) bool {
	for len(b) > len(zeros) {
		if !bytes.Equal(b[:len(zeros)], zeros[:]) {
			return false
		}
		b = b[len(zeros):]
	}
	return bytes.Equal(b, zeros[:len(b)])
}
