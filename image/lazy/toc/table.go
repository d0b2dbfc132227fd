package toc

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/image/unpack"
	"berth/internal/errdefs"
)

const (
	// maxEntries limits the entries of a table. Each takes about a hundred bytes of memory.
	maxEntries = 1 << 19
	// maxEntry limits the text of an entry. archive/tar reads headers of at most a mebibyte.
	maxEntry = 2 << 20
	// maxBlocks limits the data file, because EROFS stores the number of a block in four bytes.
	maxBlocks = 1<<32 - 2
	// whiteout begins the names of whiteouts.
	whiteout = ".wh."
)

// Table is a table of contents. It keeps the text of the table. Of each entry it keeps only the
// part that Index needs.
type Table struct {
	ref      Ref
	text     []byte
	own      *tar.Header // of the table itself, if it is a file of the layer; otherwise nil
	ownChunk chunk
	ztoc     *ztoc // of SOCI's table; nil: another format
	end      int64 // of the part of the blob that has files

	files  []int64 // sizes of the files with content, in the order of the tar
	chunks []chunk
	size   int64 // of all files
}

// chunk is a part of a file.
type chunk struct {
	offset int64 // of the gzip member or zstd frame in the blob; for SOCI's table: of the content in the tar
	inner  int64 // in what that decompresses to
	size   int64
	file   int   // index in files
	at     int64 // in the file
	sum    [sha256.Size]byte
}

// entry is an entry of a table. The formats in JSON have the same fields.
type entry struct {
	Name        string            `json:"name"`
	Type        string            `json:"type"`
	Size        int64             `json:"size"`
	ModTime     string            `json:"modtime"`
	LinkName    string            `json:"linkName"`
	Mode        int64             `json:"mode"`
	UID         int               `json:"uid"`
	GID         int               `json:"gid"`
	Offset      int64             `json:"offset"`
	InnerOffset int64             `json:"innerOffset"`
	DevMajor    int64             `json:"devMajor"`
	DevMinor    int64             `json:"devMinor"`
	Xattrs      map[string][]byte `json:"xattrs"`
	Digest      string            `json:"digest"`
	ChunkOffset int64             `json:"chunkOffset"`
	ChunkSize   int64             `json:"chunkSize"`
	ChunkDigest string            `json:"chunkDigest"`
}

// types are the types of entries. typeChunk is a further part of the previous file.
var types = map[string]byte{
	"reg": tar.TypeReg, "dir": tar.TypeDir, "symlink": tar.TypeSymlink, "hardlink": tar.TypeLink, "char": tar.TypeChar,
	"block": tar.TypeBlock, "fifo": tar.TypeFifo,
}

const typeChunk = "chunk"

// entries are the entries of a table, one by one. After the last one it returns io.EOF.
type entries interface{ next() (entry, error) }

// entries returns all entries of the table.
func (t *Table) entries() entries {
	if t.ztoc != nil {
		return newZtocReader(t.text)
	}
	return newReader(t.text)
}

// reader reads the entries of a table in JSON.
type reader struct {
	*json.Decoder
	inside bool
}

func newReader(text []byte) *reader { return &reader{Decoder: json.NewDecoder(bytes.NewReader(text))} }

// next implements entries.
func (r *reader) next() (e entry, err error) {
	if !r.inside {
		if err := r.enter(); err != nil {
			return e, err
		}
		r.inside = true
	}
	if !r.More() {
		return e, io.EOF
	}
	var text json.RawMessage
	err = r.Decode(&text)
	if err == nil && len(text) > maxEntry {
		return e, malformed("an entry of %d bytes", len(text))
	}
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err == nil && len(e.Xattrs) > tree.MaxXattrs {
		return e, malformed("%d extended attributes", len(e.Xattrs))
	}
	if err != nil {
		return e, malformed("%s", errdefs.Clip(err.Error())) // the error quotes the text
	}
	return e, nil
}

// enter reads up to the first entry.
func (r *reader) enter() error {
	if err := r.expect(json.Delim('{')); err != nil {
		return err
	}
	for r.More() {
		key, err := r.Token()
		if err != nil {
			return malformed("%v", err)
		}
		if key == "entries" {
			return r.expect(json.Delim('['))
		}
		var other json.RawMessage
		if err := r.Decode(&other); err != nil {
			return malformed("%v", err)
		}
		if key == "version" && string(other) != "1" {
			return malformed("version %.20s", other)
		}
	}
	return malformed("no entries")
}

func (r *reader) expect(want json.Delim) error {
	if got, err := r.Token(); err != nil || got != want {
		return malformed("%.100s in place of %v: %v", fmt.Sprint(got), want, err)
	}
	return nil
}

// survey checks the entries, and notes what Index needs.
func (t *Table) survey() error {
	s := surveyor{t: t, seed: maphash.MakeSeed(), names: map[uint64]bool{}}
	in := t.entries()
	for n := 0; ; n++ {
		e, err := in.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil && n >= maxEntries {
			err = malformed("more than %d entries", maxEntries)
		}
		if err == nil {
			err = s.add(&e)
		}
		if err != nil {
			return err
		}
	}
	if t.own != nil {
		if err := s.name(t.own.Name, false); err != nil {
			return err
		}
	}
	if len(t.chunks) == 0 {
		return malformed("no file has content")
	}
	return s.finish()
}

// settleOwn decides whether the table is a file of the layer. Some encoders write the end of the
// tar into the last member before the table. Then the table is not in the tar.
func (t *Table) settleOwn(last []byte) error {
	c := &t.chunks[len(t.chunks)-1]
	size := t.files[c.file]
	rest := c.inner + c.size + -size&(tarBlock-1)
	if rest > int64(len(last)) || (int64(len(last))-rest)%tarBlock != 0 {
		return malformed("the last member has %d bytes", len(last))
	}
	if after := last[rest:]; len(after) > 0 && !slices.ContainsFunc(after[len(after)-tarBlock:], isSet) {
		t.own = nil
		return nil
	}
	t.ownChunk.file, t.end = len(t.files), t.ref.blobSize
	t.files, t.size = append(t.files, t.ownChunk.size), t.size+t.ownChunk.size
	t.chunks = append(t.chunks, t.ownChunk)
	return nil
}

// tarBlock is the length of a block of a tar.
const tarBlock = 512

func isSet(b byte) bool { return b != 0 }

// surveyor checks the order of entries.
type surveyor struct {
	t     *Table
	seed  maphash.Seed
	names map[uint64]bool // by the hash of a name: whether it is a directory
	file  string          // of the file that the next chunk belongs to
	left  int64           // of that file
}

// add checks an entry.
func (s *surveyor) add(e *entry) error {
	if e.Type == typeChunk {
		if e.Name != s.file || s.left == 0 {
			return malformed("a chunk of %.100q", e.Name)
		}
		return s.part(e)
	}
	if err := s.finish(); err != nil {
		return err
	}
	kind, known := types[e.Type]
	if !known {
		return malformed("%.100q has the type %.20q", e.Name, e.Type)
	}
	if err := s.name(e.Name, kind == tar.TypeDir); err != nil {
		return err
	}
	if kind != tar.TypeReg || e.Size == 0 {
		return nil
	}
	if e.Size < 0 || e.Size > unpack.DefaultLimits.Bytes-s.t.size || strings.HasPrefix(path.Base(e.Name), whiteout) {
		return malformed("%.100q has %d bytes", e.Name, e.Size)
	}
	s.t.files, s.t.size = append(s.t.files, e.Size), s.t.size+e.Size
	s.file, s.left = e.Name, e.Size
	if s.t.ztoc != nil {
		return s.extent(e)
	}
	return s.part(e)
}

// name checks that no two entries have the same name, unless they are directories. Unpacking would
// drop the content of the first entry.
func (s *surveyor) name(name string, isDir bool) error {
	hash := maphash.String(s.seed, path.Clean("/"+name))
	if wasDir, there := s.names[hash]; there && !(wasDir && isDir) {
		return malformed("two entries %.100q", name)
	}
	s.names[hash] = isDir
	return nil
}

// part adds the chunk of an entry.
func (s *surveyor) part(e *entry) error {
	last := len(s.t.files) - 1
	c := chunk{offset: e.Offset, inner: e.InnerOffset, size: e.ChunkSize, file: last, at: e.ChunkOffset}
	if c.size == 0 { // to the end of the file
		c.size = s.left
	}
	sum := e.ChunkDigest
	if sum == "" && c.at == 0 && c.size == s.t.files[last] { // the only chunk
		sum = e.Digest
	}
	text, ok := strings.CutPrefix(sum, "sha256:")
	if n, err := hex.Decode(c.sum[:], []byte(text[:min(len(text), 2*len(c.sum))])); !ok || err != nil || n != len(c.sum) ||
		len(text) != 2*len(c.sum) {
		return malformed("%.100q has a chunk with the digest %.100q", e.Name, sum)
	}
	if c.size < 0 || c.size > s.left || c.at != s.t.files[last]-s.left {
		return malformed("%.100q has a chunk of %d bytes at %d", e.Name, c.size, c.at)
	}
	return s.chunk(c)
}

// chunk adds a chunk. Chunks are in the order of the blob.
func (s *surveyor) chunk(c chunk) error {
	t := s.t
	if c.offset < 0 || c.offset >= t.end || c.inner < 0 || c.inner > maxTable {
		return malformed("a chunk at %d of the blob", c.offset)
	}
	if n := len(t.chunks); n > 0 {
		before := &t.chunks[n-1]
		if c.offset < before.offset || c.offset == before.offset && c.inner < before.inner+before.size {
			return malformed("a chunk at %d of the blob follows one at %d", c.offset, before.offset)
		}
		next := c.offset > before.offset && c.inner == 0 || c.offset == before.offset && c.inner == before.inner+before.size
		if c.file == before.file && !next {
			return malformed("a gap between the chunks at %d and %d of the blob", before.offset, c.offset)
		}
	}
	s.left -= c.size
	t.chunks = append(t.chunks, c)
	return nil
}

// finish checks that the chunks of the last file are complete.
func (s *surveyor) finish() error {
	if s.left != 0 {
		return malformed("%.100q lacks %d bytes", s.file, s.left)
	}
	return nil
}

// header returns the header of an entry in the outline.
func (e *entry) header() (*tar.Header, error) {
	hdr := &tar.Header{Typeflag: types[e.Type], Name: e.Name, Linkname: e.LinkName, Mode: e.Mode & unpack.ModeBits,
		Uid: e.UID, Gid: e.GID, Devmajor: e.DevMajor, Devminor: e.DevMinor, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	if e.ModTime != "" {
		at, err := time.Parse(time.RFC3339Nano, e.ModTime)
		if err != nil {
			return nil, malformed("%.100q has the time %.100q", e.Name, e.ModTime)
		}
		hdr.ModTime = at
	}
	for name, value := range e.Xattrs {
		if hdr.PAXRecords == nil {
			hdr.PAXRecords = map[string]string{}
		}
		hdr.PAXRecords[unpack.XattrRecord+name] = string(value)
	}
	if hdr.Typeflag == tar.TypeReg && e.Size > 0 {
		hdr.Size = 1
	}
	return hdr, nil
}

// Outline returns a tar with all entries. Outline replaces the content of each file by one byte, so
// the result is not the blob's tar. Errors of the reader wrap ErrMalformed.
func (t *Table) Outline() io.Reader {
	o := &outline{t: t, in: t.entries()}
	o.tar = tar.NewWriter(&o.buf)
	return o
}

type outline struct {
	t   *Table
	in  entries
	tar *tar.Writer
	buf bytes.Buffer
	end bool
}

// Read implements io.Reader.
func (o *outline) Read(p []byte) (int, error) {
	for o.buf.Len() == 0 {
		if o.end {
			return 0, io.EOF
		}
		if err := o.more(); err != nil {
			return 0, err
		}
	}
	return o.buf.Read(p)
}

// more writes the next entry to the buffer.
func (o *outline) more() error {
	e, err := o.in.next()
	switch {
	case errors.Is(err, io.EOF):
		return o.finish()
	case err != nil || e.Type == typeChunk:
		return err
	}
	hdr, err := e.header()
	if err != nil {
		return err
	}
	return o.write(hdr)
}

func (o *outline) write(hdr *tar.Header) error {
	if err := o.tar.WriteHeader(hdr); err != nil {
		return malformed("%.100q: %v", hdr.Name, err)
	}
	if _, err := o.tar.Write(make([]byte, hdr.Size)); err != nil {
		return malformed("%.100q: %v", hdr.Name, err)
	}
	return o.tar.Flush()
}

func (o *outline) finish() error {
	if o.t.own != nil {
		own := *o.t.own
		own.Size = 1
		if err := o.write(&own); err != nil {
			return err
		}
	}
	o.end = true
	return o.tar.Close()
}

// blocks returns the number of blocks of a file.
func blocks(size int64) int64 { return (size + tree.BlockSize - 1) / tree.BlockSize }

// Place puts the sizes and places of the files into a tree that was made from the Outline. size is
// the length of the data file. Errors wrap ErrMalformed.
func (t *Table) Place(root *tree.Node, size int64) error {
	if size != int64(len(t.files))*tree.BlockSize {
		return malformed("%d files of the outline have %d bytes", len(t.files), size)
	}
	starts, next := make([]uint32, len(t.files)+1), int64(0)
	for i, size := range t.files {
		starts[i] = uint32(next)
		if next += blocks(size); next >= maxBlocks {
			return malformed("its files take too many blocks")
		}
	}
	starts[len(t.files)] = uint32(next)
	return t.place(root, starts, map[*tree.Node]bool{})
}

func (t *Table) place(n *tree.Node, starts []uint32, done map[*tree.Node]bool) error {
	for _, child := range n.Children {
		if err := t.place(child, starts, done); err != nil {
			return err
		}
	}
	if n.Type() != unix.S_IFREG || done[n] {
		return nil
	}
	done[n] = true
	i := int(n.Data.Block)
	switch {
	case n.Data.Size == 0 && i <= len(t.files): // an empty file has the next block
	case n.Data.Size == 1 && i < len(t.files) && len(n.Data.Holes) == 0:
		n.Data.Size = t.files[i]
	default:
		return malformed("a file of the outline has %d bytes in block %d", n.Data.Size, i)
	}
	n.Data.Block = starts[i]
	return nil
}
