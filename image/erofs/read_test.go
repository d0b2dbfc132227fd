package erofs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

// reader reads the part of EROFS that Write uses, after fs/erofs of Linux. It shares no code with
// the writer.
type reader struct {
	image   []byte
	devices []int64 // blocks
	files   map[uint64]*tree.Node
	links   map[uint64]uint32 // names found
	linked  map[uint64]uint32 // names that inodes say they have
	used    []span
}

// span is a used part of the image.
type span struct{ from, to int64 }

var errImage = errors.New("not an image")

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errImage, fmt.Sprintf(format, args...))
}

// read returns the tree of an image, with files that have several names once.
func read(image []byte) (*tree.Node, *reader, error) {
	r := &reader{image: image, files: map[uint64]*tree.Node{}, links: map[uint64]uint32{}, linked: map[uint64]uint32{}}
	root, err := r.super()
	if err != nil {
		return nil, nil, err
	}
	n, err := r.inode(root)
	if err != nil {
		return nil, nil, err
	}
	if err := r.directory(n, root, root); err != nil {
		return nil, nil, err
	}
	for nid, names := range r.linked {
		if found := r.links[nid]; names != found {
			return nil, nil, bad("inode %d has %d links, and %d names", nid, names, found)
		}
	}
	return n, r, r.checkSpans()
}

// take returns a part of the image, and fails if another object uses any of it.
func (r *reader) take(from, size int64) ([]byte, error) {
	if from < 0 || size < 0 || from+size > int64(len(r.image)) {
		return nil, bad("%d bytes at %d of %d", size, from, len(r.image))
	}
	if size > 0 {
		r.used = append(r.used, span{from, from + size})
	}
	return r.image[from : from+size], nil
}

func (r *reader) checkSpans() error {
	slices.SortFunc(r.used, func(a, b span) int { return int(a.from - b.from) })
	last := int64(0)
	for _, s := range r.used {
		if s.from < last {
			return bad("something ends at %d, and the next begins at %d", last, s.from)
		}
		if slices.ContainsFunc(r.image[last:s.from], func(b byte) bool { return b != 0 }) {
			return bad("nothing is between %d and %d, but not zeros", last, s.from)
		}
		last = s.to
	}
	return nil
}

var le = binary.LittleEndian

func (r *reader) super() (root uint64, err error) {
	if len(r.image)%4096 != 0 {
		return 0, bad("%d bytes", len(r.image))
	}
	s, err := r.take(1024, 128)
	if err != nil {
		return 0, err
	}
	sum := slices.Clone(r.image[1024:4096])
	clear(sum[4:8])
	switch {
	case le.Uint32(s) != 0xE0F5E1E2 || s[12] != 12:
		return 0, bad("magic %x, block size 1<<%d", s[:4], s[12])
	case ^crc32.Checksum(sum, crc32.MakeTable(crc32.Castagnoli)) != le.Uint32(s[4:]):
		return 0, bad("the checksum is wrong")
	case int64(le.Uint32(s[36:]))*4096 != int64(len(r.image)):
		return 0, bad("%d blocks in %d bytes", le.Uint32(s[36:]), len(r.image))
	}
	for i := range int64(le.Uint16(s[86:])) {
		d, err := r.take((int64(le.Uint16(s[88:]))+i)*128, 128)
		if err != nil {
			return 0, err
		}
		r.devices = append(r.devices, int64(le.Uint32(d[64:])))
	}
	return uint64(le.Uint16(s[14:])), nil
}

// inode returns the node of an inode. That of a directory is without its children.
func (r *reader) inode(nid uint64) (*tree.Node, error) {
	at := int64(nid) * 32
	b, err := r.take(at, 64)
	if err != nil {
		return nil, err
	}
	n := &tree.Node{Mode: uint32(le.Uint16(b[4:])), UID: le.Uint32(b[24:]), GID: le.Uint32(b[28:]), Sec: int64(le.Uint64(b[32:])), Nsec: le.Uint32(b[40:])}
	r.linked[nid] = le.Uint32(b[44:])
	format, size := le.Uint16(b), int64(le.Uint64(b[8:]))
	if format&1 != 1 || at%4096+64 > 4096 {
		return nil, bad("an inode of format %#x at %d", format, at)
	}
	at += 64
	if words := int64(le.Uint16(b[2:])); words > 0 {
		if at, err = r.xattrs(n, at, 12+(words-1)*4); err != nil {
			return nil, err
		}
	}
	switch n.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		n.Children = map[string]*tree.Node{}
		n.Target, err = r.content(format>>1, at, size, le.Uint32(b[16:])) // its entries, until directory has read them
	case unix.S_IFLNK:
		n.Target, err = r.content(format>>1, at, size, le.Uint32(b[16:]))
	case unix.S_IFREG:
		err = r.data(n, format>>1, at, size, le.Uint32(b[16:]))
	case unix.S_IFCHR, unix.S_IFBLK:
		dev := le.Uint32(b[16:])
		n.Major, n.Minor = dev&0xfff00>>8, dev&0xff|dev>>12&0xfff00
	case unix.S_IFIFO:
	default:
		return nil, bad("a file of mode %#o", n.Mode)
	}
	return n, err
}

func (r *reader) xattrs(n *tree.Node, at, size int64) (end int64, err error) {
	b, err := r.take(at, size)
	if err != nil {
		return 0, err
	}
	if slices.ContainsFunc(b[:12], func(b byte) bool { return b != 0 }) {
		return 0, bad("shared extended attributes")
	}
	prefixes := map[byte]string{1: "user.", 2: "system.posix_acl_access", 3: "system.posix_acl_default", 6: "security."}
	for rest := b[12:]; len(rest) > 0; {
		name, value := int(rest[0]), int(le.Uint16(rest[2:]))
		entry := 4 + name + value
		if prefixes[rest[1]] == "" || entry > len(rest) {
			return 0, bad("an extended attribute of kind %d with %d bytes", rest[1], entry)
		}
		n.Xattrs = append(n.Xattrs, tree.Xattr{Name: prefixes[rest[1]] + string(rest[4:4+name]), Value: string(rest[4+name : entry])})
		rest = rest[min((entry+3)&^3, len(rest)):]
	}
	return at + size, nil
}

// content reads a directory or symlink. Its last block may be next to the inode.
func (r *reader) content(layout uint16, at, size int64, block uint32) (string, error) {
	switch layout {
	case 0:
		b, err := r.take(int64(block)*4096, size)
		return string(b), err
	case 2:
		head, err := r.take(int64(block)*4096, size/4096*4096)
		if err != nil {
			return "", err
		}
		tail, err := r.take(at, size%4096)
		if err == nil && at%4096+size%4096 > 4096 {
			err = bad("the end of a file at %d crosses a block", at)
		}
		return string(head) + string(tail), err
	}
	return "", bad("layout %d", layout)
}

// data finds where a file's content is.
func (r *reader) data(n *tree.Node, layout uint16, at, size int64, format uint32) error {
	n.Data.Size = size
	if size == 0 && layout == 0 {
		return nil
	}
	if layout != 4 || format&^0x1f != 0x20 {
		return bad("a file of %d bytes with layout %d, %#x", size, layout, format)
	}
	bits := format & 0x1f
	chunks := (n.Data.Blocks() + 1<<bits - 1) >> bits
	b, err := r.take((at+7)&^7, 8*chunks)
	if err != nil {
		return err
	}
	holes := make([]byte, (chunks+7)/8)
	known, some := false, false
	for c := range chunks {
		block, device := le.Uint32(b[8*c+4:]), int(le.Uint16(b[8*c+2:]))-1
		if block == 0xffffffff {
			holes[c/8] |= 1 << (c % 8)
			some = true
			continue
		}
		first := int64(block) - c<<bits
		if !known {
			n.Data.Block, n.Data.Device, known = uint32(first), device, true
		}
		if first != int64(n.Data.Block) || device != n.Data.Device || device < 0 || device >= len(r.devices) || first+n.Data.Blocks() > r.devices[device] {
			return bad("chunk %d is block %d of device %d", c, block, device)
		}
	}
	if some {
		n.Data.Holes, n.Data.ChunkBits = holes, uint8(bits)
	}
	return nil
}

// directory reads the entries of a directory, and all below it.
func (r *reader) directory(n *tree.Node, nid, parent uint64) error {
	content := []byte(n.Target)
	n.Target = ""
	last, types := "", map[byte]uint32{1: unix.S_IFREG, 2: unix.S_IFDIR, 3: unix.S_IFCHR, 4: unix.S_IFBLK, 5: unix.S_IFIFO, 7: unix.S_IFLNK}
	dots := 0
	for block := range slices.Chunk(content, 4096) {
		if len(block) < 12 {
			return bad("a directory ends with %d bytes", len(block))
		}
		first := int(le.Uint16(block[8:]))
		if first%12 != 0 || first == 0 || first > len(block) {
			return bad("the first name of a directory at %d", first)
		}
		for at := 0; at < first; at += 12 {
			from, to := int(le.Uint16(block[at+8:])), len(block)
			if at+12 < first {
				to = int(le.Uint16(block[at+12+8:]))
			}
			if from > to || to > len(block) || from < first {
				return bad("a name from %d to %d", from, to)
			}
			name, child, kind := string(bytes.TrimRight(block[from:to], "\x00")), le.Uint64(block[at:]), types[block[at+10]]
			if name <= last || kind == 0 {
				return bad("the name %q after %q, of type %d", name, last, block[at+10])
			}
			last = name
			r.links[child]++
			if name == "." || name == ".." {
				if dots++; child != map[string]uint64{".": nid, "..": parent}[name] {
					return bad("%q is inode %d", name, child)
				}
				continue
			}
			if err := r.entry(n, name, child, nid, kind); err != nil {
				return fmt.Errorf("%.50q: %w", name, err)
			}
		}
	}
	if dots != 2 {
		return bad("a directory without itself or what is above")
	}
	return nil
}

func (r *reader) entry(dir *tree.Node, name string, nid, parent uint64, kind uint32) (err error) {
	n := r.files[nid]
	if n == nil {
		if n, err = r.inode(nid); err != nil {
			return err
		}
		r.files[nid] = n
		if n.IsDir() {
			if err := r.directory(n, nid, parent); err != nil {
				return err
			}
		}
	} else if n.IsDir() {
		return bad("a directory with two names")
	}
	if n.Type() != kind {
		return bad("a file of mode %#o is listed as %#o", n.Mode, kind)
	}
	dir.Children[name] = n
	return nil
}

// plainData normalizes trees for a comparison: it merges chunks without a hole between them and
// clears the bits behind the last chunk.
func plainData(root *tree.Node) {
	seen := map[*tree.Node]bool{}
	var walk func(n *tree.Node)
	walk = func(n *tree.Node) {
		if seen[n] {
			return
		}
		seen[n] = true
		some, blocks := false, false
		holes := make([]byte, len(n.Data.Holes))
		for c := range n.Data.Chunks() {
			if n.Data.IsHole(c) {
				holes[c/8] |= 1 << (c % 8)
				some = true
			} else {
				blocks = true
			}
		}
		if n.Data.Holes = holes; !some {
			n.Data.Holes, n.Data.ChunkBits = nil, 0
		}
		if !blocks {
			n.Data.Block, n.Data.Device = 0, 0
		}
		for _, child := range n.Children {
			walk(child)
		}
	}
	walk(root)
}

// readsBack fails if the image does not contain exactly the tree.
func readsBack(t testing.TB, image []byte, root *tree.Node, devices []int64) {
	t.Helper()
	got, r, err := read(image)
	testutil.Must(t, err)
	if !slices.Equal(r.devices, devices) {
		t.Errorf("devices %v, not %v", r.devices, devices)
	}
	plainData(root)
	var want, have bytes.Buffer
	testutil.Must(t, tree.Encode(&want, root))
	testutil.Must(t, tree.Encode(&have, got))
	if !bytes.Equal(want.Bytes(), have.Bytes()) {
		t.Errorf("the image has\n%.4000q\nnot\n%.4000q", have.Bytes(), want.Bytes())
	}
}

// Images of random trees, when read back, have the same trees.
func TestWriteReadsBack(t *testing.T) {
	for seed := range uint64(16) {
		m := newMaker(seed+100, 1+int(seed%7))
		root := m.directory(4, 20)
		var devices []int64
		for i := range m.data {
			devices = append(devices, int64(m.data[i].Len()/blockSize))
		}
		var image bytes.Buffer
		_, err := Write(&image, root, devices)
		testutil.Must(t, err)
		readsBack(t, image.Bytes(), root, devices)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// fuzzBlocks is how large the data files are that a fuzzer's trees refer to.
const fuzzBlocks = 1 << 16

// FuzzMerge merges up to three layers with arbitrary trees and reads the image. fsck.erofs and the
// kernel check the images of the seeds too.
func FuzzMerge(f *testing.F) {
	encode := func(root *tree.Node) []byte {
		var b bytes.Buffer
		testutil.Must(f, tree.Encode(&b, root))
		return b.Bytes()
	}
	for seed := range uint64(6) {
		var layers [3][]byte
		for i := range layers {
			m := newMaker(10*seed+uint64(i), 1)
			root := m.directory(1, 4) // keeps the fuzzer fast
			root.Children["whiteout"] = &tree.Node{Mode: unix.S_IFCHR}
			root.Children["dir"] = m.directory(0, 3)
			root.Children["dir"].Opaque, root.Children["dir"].Implied = seed%2 == 0, seed%3 == 0
			root.Children["file"] = m.file()
			if i > 0 {
				root.Children["link"] = &tree.Node{Target: "file"}
			}
			layers[i] = encode(root)
		}
		f.Add(layers[0], layers[1], layers[2])
	}
	fuzzing := flag.Lookup("test.fuzz").Value.String() != ""
	f.Fuzz(func(t *testing.T, a, b, c []byte) {
		steps := 0
		m := &tree.Merger{Pay: func(n int) error {
			if steps += n; steps > 1<<16 {
				return tree.ErrTooLarge
			}
			return nil
		}}
		layers := 0
		for _, data := range [][]byte{a, b, c} {
			root, _, err := tree.Decode(bytes.NewReader(data), layers, tree.Limit{Bytes: 1 << 20, Memory: 2 << 20, Blocks: fuzzBlocks})
			if err != nil {
				continue
			}
			layers++
			if err := m.Add(root); err != nil {
				return
			}
		}
		if layers == 0 {
			return
		}
		root := m.Root()
		devices := slices.Repeat([]int64{fuzzBlocks}, len(number(root, layers)))
		var image bytes.Buffer
		_, err := Write(&image, root, devices)
		testutil.Must(t, err)
		if !fuzzing {
			mountsAs(t, image.Bytes(), root, len(devices))
		}
		readsBack(t, image.Bytes(), root, devices)
	})
}

// mountsAs has fsck.erofs and the kernel read an image whose files have nothing but zeros in them.
func mountsAs(t *testing.T, image []byte, root *tree.Node, devices int) {
	t.Helper()
	dir := testutil.DiskDir(t)
	l := rootfs.Layer{Kind: rootfs.EROFS, Path: filepath.Join(dir, "image")}
	testutil.Must(t, os.WriteFile(l.Path, image, 0o600))
	for i := range devices {
		path := filepath.Join(dir, fmt.Sprint("data", i))
		testutil.Must(t, os.WriteFile(path, nil, 0o600))
		testutil.Must(t, os.Truncate(path, fuzzBlocks*blockSize))
		l.Data = append(l.Data, path)
	}
	m := &maker{content: map[*tree.Node][]byte{}}
	zeros := make([]byte, fuzzBlocks*blockSize)
	var walk func(n *tree.Node)
	walk = func(n *tree.Node) {
		m.content[n] = zeros[:n.Data.Size]
		for _, child := range n.Children {
			walk(child)
		}
	}
	walk(root)
	fsck(t, l)
	m.compare(t, attached(t, l), root, map[*tree.Node]uint64{})
}
