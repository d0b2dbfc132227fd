package toctest

import (
	"archive/tar"
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Ztoc is SOCI's table. Encode writes it as SOCI does (ztoc.fbs).
type Ztoc struct {
	Version           string
	BlobSize, TarSize int64
	Kind              byte                // 1: gzip
	Files             []*estargz.TOCEntry // Offset is the offset of the content in the tar
	Records           map[string]string   // further PAX records of the first file
	Points            []ZtocPoint
	Sums              []string
	Old               bool // the first point is left out, as by older versions
}

// ZtocPoint is where decompression can begin.
type ZtocPoint struct {
	In, Out int64
	Bits    byte
	Window  [32 << 10]byte
}

// Soci makes a gzip blob with SOCI's table. There is a point every ChunkSize bytes.
func Soci(data []byte, o Options) (*Blob, error) {
	b := &Blob{MediaType: ocispec.MediaTypeImageLayerGzip, Tar: data, DiffID: digest.FromBytes(data)}
	z := &Ztoc{Version: "0.9", TarSize: int64(len(data)), Kind: 1}
	if o.ChunkSize == 0 {
		o.ChunkSize = 4 << 20
	}
	if err := b.gzip(z, o.ChunkSize); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	z.BlobSize = int64(len(b.Bytes))
	for i, p := range z.Points {
		end := z.BlobSize
		if i+1 < len(z.Points) {
			end = z.Points[i+1].In
		}
		z.Sums = append(z.Sums, digest.FromBytes(b.Bytes[p.In:end]).String())
	}
	var err error
	if z.Files, err = entries(data); err != nil {
		return nil, fmt.Errorf("read the tar: %w", err)
	}
	if o.Lie != nil {
		table := &estargz.JTOC{Version: 1, Entries: z.Files}
		o.Lie(table)
		z.Files = table.Entries
	}
	if o.LieZtoc != nil {
		o.LieZtoc(z)
	}
	b.Ztoc = z.Encode()
	return b, nil
}

// gzip compresses the tar in parts, and notes a point at the begin of each.
func (b *Blob) gzip(z *Ztoc, size int) error {
	var out bytes.Buffer
	out.WriteString("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff")
	w, err := flate.NewWriter(&out, 1)
	if err != nil {
		return err
	}
	for at := 0; at < len(b.Tar); at += size {
		if err := w.Flush(); err != nil && at > 0 { // a block ends with a whole byte
			return err
		}
		p := ZtocPoint{In: int64(out.Len()), Out: int64(at)}
		if at == 0 {
			p.In = 10
		}
		before := b.Tar[max(at-len(p.Window), 0):at]
		copy(p.Window[len(p.Window)-len(before):], before)
		z.Points = append(z.Points, p)
		if _, err := w.Write(b.Tar[at:min(at+size, len(b.Tar))]); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	trailer := binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(b.Tar))
	out.Write(binary.LittleEndian.AppendUint32(trailer, uint32(len(b.Tar)))) //nolint:gosec // as gzip does
	b.Bytes = out.Bytes()
	return nil
}

// entries returns the entries of a tar.
func entries(data []byte) (list []*estargz.TOCEntry, err error) {
	kinds := map[byte]string{tar.TypeReg: "reg", tar.TypeDir: "dir", tar.TypeSymlink: "symlink", tar.TypeLink: "hardlink",
		tar.TypeChar: "char", tar.TypeBlock: "block", tar.TypeFifo: "fifo"}
	in := bytes.NewReader(data)
	for r := tar.NewReader(in); ; {
		hdr, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		e := &estargz.TOCEntry{Name: hdr.Name, Type: kinds[hdr.Typeflag], Size: hdr.Size, LinkName: hdr.Linkname, Mode: hdr.Mode,
			UID: hdr.Uid, GID: hdr.Gid, DevMajor: int(hdr.Devmajor), DevMinor: int(hdr.Devminor), Offset: int64(len(data) - in.Len()),
			ModTime3339: hdr.ModTime.Format(time.RFC3339Nano), Xattrs: map[string][]byte{}}
		for key, value := range hdr.PAXRecords {
			if name, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok {
				e.Xattrs[name] = []byte(value)
			}
		}
		list = append(list, e)
	}
}

// Encode returns the flatbuffer.
func (z *Ztoc) Encode() []byte {
	w := &flatWriter{b: make([]byte, 4)}
	files := make([]func() int, len(z.Files))
	for i, e := range z.Files {
		records := map[string]string{}
		for name, value := range e.Xattrs {
			records["SCHILY.xattr."+name] = string(value)
		}
		for key, value := range z.Records {
			if i == 0 {
				records[key] = value
			}
		}
		files[i] = func() int {
			return w.table(w.text(e.Name), w.text(e.Type), e.Offset+e.InnerOffset, e.Size, w.text(e.LinkName), e.Mode, uint32(e.UID), //nolint:gosec // as SOCI does
				uint32(e.GID), w.text(""), w.text(""), w.text(e.ModTime3339), int64(e.DevMajor), int64(e.DevMinor), w.records(records)) //nolint:gosec // as SOCI does
		}
	}
	sums := make([]func() int, len(z.Sums))
	for i, sum := range z.Sums {
		sums[i] = w.text(sum)
	}
	points := z.points()
	root := w.table(w.text(z.Version), w.text("test"), z.BlobSize, z.TarSize,
		func() int { return w.table(w.vector(files)) },
		func() int {
			return w.table(z.Kind, uint32(len(z.Sums)-1), w.vector(sums), func() int { return w.bytes(points) }) //nolint:gosec // few
		})
	binary.LittleEndian.PutUint32(w.b, uint32(root)) //nolint:gosec // small
	return w.b
}

func (z *Ztoc) points() []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(z.Points))) //nolint:gosec // few
	b = binary.LittleEndian.AppendUint64(b, 4<<20)
	for i, p := range z.Points {
		if i == 0 && z.Old {
			continue
		}
		b = binary.LittleEndian.AppendUint64(b, uint64(p.In))  //nolint:gosec // not negative
		b = binary.LittleEndian.AppendUint64(b, uint64(p.Out)) //nolint:gosec // not negative
		b = append(append(b, p.Bits), p.Window[:]...)
	}
	return b
}

// flatWriter writes a flatbuffer. Each object comes before the objects to which it refers.
type flatWriter struct{ b []byte }

// table writes a table and everything to which it refers, and returns its place. A field is a
// number, or a function that writes something and returns its place.
func (w *flatWriter) table(fields ...any) int {
	shape := len(w.b)
	w.b = append(w.b, make([]byte, 4+2*len(fields))...)
	at := len(w.b)
	w.b = binary.LittleEndian.AppendUint32(w.b, uint32(at-shape)) //nolint:gosec // small
	type reference struct {
		place int
		write func() int
	}
	var later []reference
	for i, field := range fields {
		binary.LittleEndian.PutUint16(w.b[shape+4+2*i:], uint16(len(w.b)-at)) //nolint:gosec // small
		switch v := field.(type) {
		case byte:
			w.b = append(w.b, v)
		case uint32:
			w.b = binary.LittleEndian.AppendUint32(w.b, v)
		case int64:
			w.b = binary.LittleEndian.AppendUint64(w.b, uint64(v)) //nolint:gosec // as it is
		case func() int:
			later = append(later, reference{len(w.b), v})
			w.b = append(w.b, 0, 0, 0, 0)
		}
	}
	binary.LittleEndian.PutUint16(w.b[shape:], uint16(4+2*len(fields))) //nolint:gosec // small
	binary.LittleEndian.PutUint16(w.b[shape+2:], uint16(len(w.b)-at))   //nolint:gosec // small
	for _, r := range later {
		to := r.write()                                                  // the call moves w.b
		binary.LittleEndian.PutUint32(w.b[r.place:], uint32(to-r.place)) //nolint:gosec // it follows
	}
	return at
}

func (w *flatWriter) bytes(b []byte) int {
	at := len(w.b)
	w.b = append(binary.LittleEndian.AppendUint32(w.b, uint32(len(b))), b...) //nolint:gosec // small
	return at
}

func (w *flatWriter) text(s string) func() int {
	return func() int { at := w.bytes([]byte(s)); w.b = append(w.b, 0); return at }
}

func (w *flatWriter) vector(elements []func() int) func() int {
	return func() int {
		at := w.bytes(make([]byte, 4*len(elements)))
		binary.LittleEndian.PutUint32(w.b[at:], uint32(len(elements))) //nolint:gosec // few
		for i, write := range elements {
			place := at + 4 + 4*i
			to := write()
			binary.LittleEndian.PutUint32(w.b[place:], uint32(to-place)) //nolint:gosec // it follows
		}
		return at
	}
}

func (w *flatWriter) records(list map[string]string) func() int {
	var elements []func() int
	for key, value := range list {
		elements = append(elements, func() int { return w.table(w.text(key), w.text(value)) })
	}
	return w.vector(elements)
}
