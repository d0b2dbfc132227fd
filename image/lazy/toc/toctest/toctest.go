// Package toctest makes blobs with tables of contents for tests: with the encoder of eStargz, and
// with one for SOCI.
package toctest

import (
	"bytes"
	"fmt"
	"hash"
	"io"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/containerd/stargz-snapshotter/estargz/zstdchunked"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image/lazy/toc"
)

// Blob is a layer's blob.
type Blob struct {
	Bytes       []byte
	Tar         []byte
	DiffID      digest.Digest
	MediaType   string
	Annotations map[string]string
	Ztoc        []byte // SOCI's table, a separate blob; nil: the blob has another table
}

// Ref returns the reference of the blob's table.
func (b *Blob) Ref() (toc.Ref, bool) {
	if b.Ztoc == nil {
		return toc.Find(b.Descriptor())
	}
	return toc.OfZtoc(b.Descriptor(), ocispec.Descriptor{Digest: digest.FromBytes(b.Ztoc), Size: int64(len(b.Ztoc))})
}

// Descriptor describes the blob as a manifest does.
func (b *Blob) Descriptor() ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: b.MediaType, Digest: digest.FromBytes(b.Bytes), Size: int64(len(b.Bytes)),
		Annotations: b.Annotations}
}

// Options say how a blob is made. The zero value is usual.
type Options struct {
	ChunkSize, MinChunkSize int
	// Rewrite writes the tar anew, without its end. Then the table of eStargz is a file of the
	// layer.
	Rewrite bool
	// Lie, if not nil, changes the table before it is written.
	Lie func(*estargz.JTOC)
	// LieZtoc changes the parts that only SOCI's table has.
	LieZtoc func(*Ztoc)
}

// Stargz makes a blob of eStargz.
func Stargz(data []byte, o Options) (*Blob, error) {
	b := &Blob{MediaType: ocispec.MediaTypeImageLayerGzip}
	table, err := b.make(data, estargz.NewGzipCompressorWithLevel(1), o)
	b.Annotations = map[string]string{toc.StargzDigest: table.String()}
	return b, err
}

// Chunked makes a blob of zstd:chunked.
func Chunked(data []byte, o Options) (*Blob, error) {
	b := &Blob{MediaType: ocispec.MediaTypeImageLayerZstd}
	said := map[string]string{}
	_, err := b.make(data, &zstdchunked.Compressor{CompressionLevel: zstd.SpeedFastest, Metadata: said}, o)
	b.Annotations = map[string]string{toc.ChunkedDigest: said[zstdchunked.ManifestChecksumAnnotation],
		toc.ChunkedPosition: said[zstdchunked.ManifestPositionAnnotation]}
	return b, err
}

// make packs a tar and returns the digest of its table.
func (b *Blob) make(data []byte, c estargz.Compressor, o Options) (digest.Digest, error) {
	var out bytes.Buffer
	packing := &compressor{Compressor: c, lie: o.Lie}
	w := estargz.NewWriterWithCompressor(&out, packing)
	w.ChunkSize, w.MinChunkSize = o.ChunkSize, o.MinChunkSize
	add := w.AppendTarLossLess
	if o.Rewrite {
		add = w.AppendTar
	}
	if err := add(bytes.NewReader(data)); err != nil {
		return "", fmt.Errorf("pack: %w", err)
	}
	table, err := w.Close()
	if err != nil {
		return "", fmt.Errorf("pack: %w", err)
	}
	b.Bytes, b.Tar, b.DiffID = out.Bytes(), packing.tar.Bytes(), digest.Digest(w.DiffID())
	return table, nil
}

// compressor keeps the tar, and applies Lie to the table.
type compressor struct {
	estargz.Compressor
	lie func(*estargz.JTOC)
	tar bytes.Buffer
}

// Writer implements estargz.Compressor.
func (c *compressor) Writer(w io.Writer) (estargz.WriteFlushCloser, error) {
	inner, err := c.Compressor.Writer(w)
	return &writer{inner, &c.tar}, err
}

// WriteTOCAndFooter implements estargz.Compressor.
func (c *compressor) WriteTOCAndFooter(w io.Writer, off int64, table *estargz.JTOC, diff hash.Hash) (digest.Digest, error) {
	if c.lie != nil {
		c.lie(table)
	}
	return c.Compressor.WriteTOCAndFooter(w, off, table, &teeHash{diff, &c.tar})
}

type writer struct {
	estargz.WriteFlushCloser
	tar *bytes.Buffer
}

// Write implements io.Writer.
func (w *writer) Write(p []byte) (int, error) {
	w.tar.Write(p)
	return w.WriteFlushCloser.Write(p)
}

// teeHash keeps what is hashed.
type teeHash struct {
	hash.Hash
	tar *bytes.Buffer
}

// Write implements io.Writer.
func (h *teeHash) Write(p []byte) (int, error) {
	h.tar.Write(p)
	return h.Hash.Write(p)
}
