package unpack

import (
	"archive/tar"
	"context"
	_ "crypto/sha256" // for package digest
	_ "crypto/sha512"
	"fmt"
	"io"
	"net/url"
	"os"

	"github.com/opencontainers/go-digest"

	"berth/image/blobindex"
	"berth/image/unpack/checksum"
	"berth/image/unpack/inflate"
	"berth/image/unpack/tarsplit"
	"berth/internal/diskusage"
	"berth/internal/safefs"
)

// Limits protect disk and memory against malicious tars. For a zero field, the value in
// DefaultLimits counts.
type Limits struct {
	Tar     int64 // length of the tar, which bounds what its files take on disk
	Bytes   int64 // length of all its files, including holes
	Entries int64 // entries of the tar
	Memory  int64 // for a tree in memory (see Pack) or for kept names; a layer that needs more fails with MoreMemory
	Window  int64 // of zstd; a layer that needs more fails with MoreWindow
}

// DefaultLimits are far above the needs of known images.
var DefaultLimits = Limits{
	Tar:     256 << 30,
	Bytes:   256 << 30,
	Entries: 4 << 20,
	Memory:  384 << 20,
	Window:  inflate.MaxWindow,
}

// WithDefaults sets zero fields to the values of DefaultLimits.
func (l Limits) WithDefaults() Limits {
	if l.Tar == 0 {
		l.Tar = DefaultLimits.Tar
	}
	if l.Bytes == 0 {
		l.Bytes = DefaultLimits.Bytes
	}
	if l.Entries == 0 {
		l.Entries = DefaultLimits.Entries
	}
	if l.Memory == 0 {
		l.Memory = DefaultLimits.Memory
	}
	if l.Window == 0 {
		l.Window = DefaultLimits.Window
	}
	return l
}

// Job says how a layer is unpacked.
type Job struct {
	Limits    Limits
	Algorithm digest.Algorithm // of Result.Digest
	// Record, if not nil, is an empty file for the record of the tar (package tarsplit). It stays
	// empty if the tar cannot be restored from the layer.
	Record *os.File
	// Points, if not nil, is an empty file for the places where decompression can begin, for
	// blobindex.DecodeRecorded. They are at least Span bytes of the tar apart. It stays empty if the
	// blob can have no index. Only Pack uses it.
	Points *os.File
	Span   int64
	// NoData makes Pack write no content of files. The data file gets its full size. The result is
	// the same as with content, so it can be compared with the result of an earlier Pack.
	NoData bool
	// Progress, if not nil, is called with the number of bytes of the tar after each read, and with
	// 0 during other long work. Calls come from several goroutines.
	Progress func(n int)
}

// Stopper is a blob whose Read may wait for the network. Stop, called concurrently, makes Read
// return an error soon. An unpacker that reads the blob in another goroutine calls Stop when it
// needs no more bytes.
type Stopper interface{ Stop() }

// Aborter is a blob that is useless after its layer was rejected. (Other blobs are read to their
// end, to verify their digest.) Abort, called concurrently with Read, makes it return an error
// soon.
type Aborter interface{ Abort() }

// Result is the result of unpacking a blob.
type Result struct {
	Digest   digest.Digest // of the tar
	TarBytes int64         // length of the tar
	Contents
}

// Within returns an error if the result exceeds the limits. Unpacking enforces the limits, so a
// result that exceeds them is false.
func (r *Result) Within(l Limits) error {
	l = l.WithDefaults()
	inodes := uint64(l.Entries) + maxNames/perEntry + 1 // directories without an entry are kept in memory, which limits their number
	switch {
	case r.TarBytes > l.Tar:
		return fmt.Errorf("tar has %d bytes, more than the %d allowed", r.TarBytes, l.Tar)
	case r.Inodes > inodes:
		return fmt.Errorf("%d files, more than the %d possible", r.Inodes, inodes)
	case r.Bytes > uint64(l.Bytes)+r.Inodes*maxBlock:
		return fmt.Errorf("%d bytes on disk, of %d files with %d bytes", r.Bytes, r.Inodes, l.Bytes)
	}
	return nil
}

// Usage is the disk usage of a layer, counted while it is made: file data in blocks of the
// filesystem, one block for each directory.
type Usage = diskusage.Usage

// Contents describes the content of a layer.
type Contents struct {
	Summary
	// Links are hard links whose targets are not in the layer.
	Links []Link
	// Implied are directories that contain entries but that the tar does not list. If a layer below
	// has such a directory, its attributes count.
	Implied []Name
	// Opaques are directories, except the root, that the caller must mark opaque.
	Opaques []Name
	// Unsupported counts extended attributes that the filesystem rejected.
	Unsupported int
}

// Summary is the part of Contents with a fixed size.
type Summary struct {
	Usage
	// Opaque is set if the root has an opaque whiteout, which hides all layers below.
	Opaque bool `json:"opaque,omitempty"`
	// Whiteouts counts the whiteouts. If overlayfs does not hide them, they are visible as devices.
	Whiteouts int `json:"whiteouts,omitempty"`
	// Sum is the checksum of the tree.
	Sum checksum.Sum `json:"sum,omitzero"`
}

// Link is a hard link that the caller must create.
type Link struct {
	Name   Name `json:"name"`
	Target Name `json:"target"`
}

// Name is a path in a layer, relative and clean; "" is the root. JSON has it percent-encoded,
// because names are arbitrary bytes and JSON is UTF-8.
type Name string

// MarshalText implements encoding.TextMarshaler.
func (n Name) MarshalText() ([]byte, error) { return []byte(url.PathEscape(string(n))), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (n *Name) UnmarshalText(text []byte) error {
	s, err := url.PathUnescape(string(text))
	if err != nil {
		return fmt.Errorf("name in a layer: %w", err)
	}
	*n = Name(s)
	return nil
}

// MaxTold limits the names in Contents, in bytes, with PerName for each. The daemon keeps them in
// memory while it stores the layer.
const MaxTold = 4 << 20

// PerName is the memory, in bytes, that counts for a name beside its text.
const PerName = 16

// Check returns an error if c has too many names (FailedPrecondition), or a name that is too long
// or not clean (InvalidArgument).
func (c *Contents) Check() error {
	told := 0
	check := func(name Name) error {
		if told += len(name) + PerName; told > MaxTold {
			return exceeds("names of unlisted and opaque directories and of links to other layers exceed %d bytes", MaxTold)
		}
		if len(name) > maxPath || safefs.Clean(string(name)) != string(name) {
			return refuse("the name %.100q", name)
		}
		return nil
	}
	for _, l := range c.Links {
		if err := check(l.Name); err != nil {
			return err
		}
		if err := check(l.Target); err != nil {
			return err
		}
	}
	for _, list := range [][]Name{c.Implied, c.Opaques} {
		for _, name := range list {
			if err := check(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// Layer writes the layer whose tar is in blob, compressed or not, into tree, an empty directory
// with mode 0755 that nothing else changes. It reads blob to its end, because bytes after the
// archive count for the digest. Another goroutine reads blob, and has ended when Layer returns. A
// Read must return when ctx is done. Layer aborts an Aborter when the layer has failed.
//
// Layer does not sync, and does not mark the Opaques. After an error the content of tree is
// undefined.
func Layer(ctx context.Context, tree *os.File, blob io.Reader, job Job) (Result, error) {
	job.Points = nil
	return run(ctx, blob, job, func(in *tarsplit.Recorder, _ *blobindex.Recorder, tick func()) (sink[*safefs.Dir], error) {
		return newUnpacker(tree, job.Limits.WithDefaults().Memory, in, tick)
	})
}

// run inflates and hashes a blob, and passes its entries to a sink.
func run[D directory](
	ctx context.Context, blob io.Reader, job Job,
	open func(in *tarsplit.Recorder, points *blobindex.Recorder, tick func()) (sink[D], error),
) (_ Result, err error) {
	var points *blobindex.Recorder
	if job.Points != nil {
		points = blobindex.NewRecorder(job.Points, job.Span)
	}
	plain, err := inflate.NewReader(blob, job.Limits.WithDefaults().Window, points)
	if err != nil {
		return Result{}, err
	}
	defer plain.Close()
	if job.Progress == nil {
		job.Progress = func(int) {}
	}
	limits := job.Limits.WithDefaults()
	s := newStream(ctx, plain, job.Algorithm.Hash(), limits.Tar, job.Progress)
	defer s.close()
	defer func() {
		if blob, ok := blob.(Aborter); ok && err != nil {
			blob.Abort()
		}
	}()
	in := recorder(s, job.Record)
	to, err := open(in, points, func() { job.Progress(0) })
	if err != nil {
		return Result{}, err
	}
	defer to.close()
	w := walk[D]{to}
	if err := w.all(ctx, tar.NewReader(in), limits); err != nil {
		return Result{}, err
	}
	if _, err := io.Copy(io.Discard, onlyReader{in}); err != nil { // bytes after the archive
		return Result{}, err
	}
	n, sum, err := s.finish()
	if err != nil {
		return Result{}, err
	}
	if err := endRecord(in, job.Record); err != nil {
		return Result{}, err
	}
	if err := endPoints(plain, job.Points); err != nil {
		return Result{}, err
	}
	contents, err := to.finish(ctx)
	if err != nil {
		return Result{}, err
	}
	return Result{Digest: digest.NewDigestFromBytes(job.Algorithm, sum), TarBytes: n, Contents: contents}, nil
}

// recorder returns a Recorder of a tar to a file, which may be nil.
func recorder(from io.Reader, record *os.File) *tarsplit.Recorder {
	if record == nil {
		return tarsplit.NewRecorder(from, nil)
	}
	return tarsplit.NewRecorder(from, record)
}

// endRecord completes the record of a tar, or empties the file.
func endRecord(in *tarsplit.Recorder, record *os.File) error {
	kept, err := in.Finish()
	if kept || err != nil || record == nil {
		return err
	}
	return record.Truncate(0)
}

// endPoints completes the points of a blob, or empties the file. A layer does not need points, so
// it is no error if they cannot be recorded.
func endPoints(plain *inflate.Reader, points *os.File) error {
	if points == nil || plain.EndPoints() == nil {
		return nil
	}
	return points.Truncate(0)
}
