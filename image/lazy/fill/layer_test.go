package fill

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/blobindex"
	"berth/image/erofs"
	"berth/image/unpack"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

// testSpan is the span size of test layers, in bytes of the tar.
const testSpan = 128 << 10

// testLayer is a layer with its blob.
type testLayer struct {
	x     *blobindex.Index
	blob  []byte
	tar   []byte
	files map[string][]byte
}

// makeLayer makes a layer of n files of random sizes.
func makeLayer(t testing.TB, seed uint64, n int, kind blobindex.Compression) *testLayer {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 7))
	noise := rand.NewChaCha8([32]byte{byte(seed)})
	l := &testLayer{files: map[string][]byte{}}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for i := range n {
		content := make([]byte, random.IntN(1<<(4+random.IntN(15))))
		_, _ = noise.Read(content) // never fails
		name := fmt.Sprintf("file%03d", i)
		testutil.Must(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}))
		_, err := w.Write(content)
		testutil.Must(t, err)
		l.files[name] = content
	}
	testutil.Must(t, w.Close())
	l.index(t, out.Bytes(), kind)
	return l
}

// index makes the blob and the index of a tar.
func (l *testLayer) index(t testing.TB, whole []byte, kind blobindex.Compression) {
	t.Helper()
	l.tar = whole
	dir := t.TempDir()
	files := map[string]*os.File{}
	for _, name := range []string{"data", "tree", "tar"} {
		f, err := os.Create(filepath.Join(dir, name))
		testutil.Must(t, err)
		defer f.Close()
		files[name] = f
	}
	result, err := unpack.Pack(t.Context(), files["data"], files["tree"], bytes.NewReader(whole),
		unpack.Job{Algorithm: digest.SHA256, Record: files["tar"]})
	testutil.Must(t, err)
	st, err := files["data"].Stat()
	testutil.Must(t, err)
	l.x = &blobindex.Index{DiffID: result.Digest, TarSize: int64(len(whole)), Kind: kind, DataSize: st.Size()}
	l.x.Tree, err = os.ReadFile(files["tree"].Name())
	testutil.Must(t, err)
	l.x.Record, err = os.ReadFile(files["tar"].Name())
	testutil.Must(t, err)
	for at := 0; at < len(whole); at += testSpan {
		l.x.Points = append(l.x.Points, blobindex.Point{In: int64(len(l.blob)), Out: int64(at), Start: true})
		part := whole[at:min(len(whole), at+testSpan)]
		if kind == blobindex.None {
			l.blob = append(l.blob, part...)
			continue
		}
		var member bytes.Buffer
		z, err := gzip.NewWriterLevel(&member, gzip.BestSpeed)
		testutil.Must(t, err)
		_, err = z.Write(part)
		testutil.Must(t, err)
		testutil.Must(t, z.Close())
		l.blob = append(l.blob, member.Bytes()...)
	}
	h := blobindex.NewHash()
	_, _ = h.Write(l.blob)
	l.x.Blob, l.x.BlobSize = digest.NewDigest(digest.SHA256, h), int64(len(l.blob))
	l.x.States, err = h.States(l.x.BlobSize)
	testutil.Must(t, err)
}

// chunked makes the index one of chunks, as a table of contents would give.
func (l *testLayer) chunked(t testing.TB) {
	t.Helper()
	contents, err := extentsOf(l.x)
	testutil.Must(t, err)
	for i := range l.x.Points {
		s := l.x.Span(i)
		testutil.Must(t, contents.inTar(s.Out, s.OutSize, func(tar, data, size int64) error {
			l.x.Chunks = append(l.x.Chunks,
				blobindex.Chunk{Out: tar, Size: size, Data: data, Sum: sha256.Sum256(l.tar[tar:][:size])})
			return nil
		}))
	}
	l.x.States = nil
}

// emptyFiles makes a layer whose first spans have the headers of empty files alone.
func emptyFiles(t testing.TB, kind blobindex.Compression) *testLayer {
	t.Helper()
	l := &testLayer{files: map[string][]byte{"file": bytes.Repeat([]byte("content"), 10_000)}}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for i := range 4 * testSpan / 512 {
		testutil.Must(t, w.WriteHeader(&tar.Header{Name: fmt.Sprintf("empty%04d", i), Mode: 0o644, Typeflag: tar.TypeReg}))
	}
	testutil.Must(t, w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(l.files["file"])), Typeflag: tar.TypeReg}))
	_, err := w.Write(l.files["file"])
	testutil.Must(t, errors.Join(err, w.Close()))
	l.index(t, out.Bytes(), kind)
	return l
}

// write writes the directory of the layer.
func (l *testLayer) write(t testing.TB, dir string) string {
	t.Helper()
	testutil.Must(t, os.Mkdir(dir, 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "tree"), l.x.Tree, 0o600))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, RecordFile), l.x.Record, 0o600))
	testutil.Must(t, Prepare(dir, l.x))
	return dir
}

// writeImage writes the image of a layer, and returns the layer to mount.
func writeImage(t testing.TB, dir string) rootfs.Layer {
	t.Helper()
	l := rootfs.Layer{Kind: rootfs.EROFS, Path: filepath.Join(dir, "image"), Data: []string{filepath.Join(dir, DataFile)}}
	f, err := os.Create(l.Path)
	testutil.Must(t, err)
	_, err = erofs.NewMerger(0).Merge(t.Context(), f,
		[]erofs.Files{{Tree: filepath.Join(dir, "tree"), Data: l.Data[0]}}, func(int) error { return nil })
	testutil.Must(t, err)
	testutil.Must(t, f.Close())
	return l
}

// mounted mounts a layer, and returns the path of its root.
func mounted(t testing.TB, dir string) string {
	t.Helper()
	root, err := writeImage(t, dir).Open()
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, root.Close()) })
	return selfFD(root)
}

// fakeSource serves a blob.
type fakeSource struct {
	blob     []byte
	requests atomic.Int64
	bytes    atomic.Int64
	rejected atomic.Int64
	limits   atomic.Int64 // the most requests at a time
	now      atomic.Int64

	first chan struct{} // what wait was at first

	mu   sync.Mutex // guards the fields below
	err  error
	wait chan struct{} // requests wait until it is closed
	bad  bool          // the bytes are wrong
}

func (s *fakeSource) set(err error, wait chan struct{}, bad bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err, s.wait, s.bad = err, wait, bad
}

// Range implements Source.
func (s *fakeSource) Range(ctx context.Context, offset, size int64) (io.ReadCloser, error) {
	s.requests.Add(1)
	s.bytes.Add(size)
	if now := s.now.Add(1); now > s.limits.Load() {
		s.limits.Store(now)
	}
	s.mu.Lock()
	err, wait, bad := s.err, s.wait, s.bad
	s.mu.Unlock()
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			s.now.Add(-1)
			return nil, ctx.Err()
		}
	}
	if err != nil {
		s.now.Add(-1)
		return nil, err
	}
	p := bytes.Clone(s.blob[offset:][:size])
	if bad {
		for i := 0; i < len(p); i += blobindex.Grid {
			p[i] ^= 1
		}
	}
	return &fakeBody{Reader: bytes.NewReader(p), s: s}, nil
}

type fakeBody struct {
	io.Reader
	s *fakeSource
}

func (b *fakeBody) Reject()      { b.s.rejected.Add(1) }
func (b *fakeBody) Close() error { b.s.now.Add(-1); return nil }

// fakeInflater decompresses gzip members.
type fakeInflater struct {
	short bool // results are too short
	open  *atomic.Int64
}

// Span implements Inflater.
func (f *fakeInflater) Span(_ context.Context, _ blobindex.Point, in []byte, out int64) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(in))
	if err != nil {
		return nil, err
	}
	p, err := io.ReadAll(io.LimitReader(z, out+1))
	if f.short {
		p = p[:len(p)-1]
	}
	return p, err
}

func (f *fakeInflater) Close() error { f.open.Add(-1); return nil }

// world is an Engine with one layer.
type world struct {
	e         *Engine
	l         *Layer
	layer     *testLayer
	source    *fakeSource
	dir       string // of the layer
	inflaters atomic.Int64
	inflate   func() (Inflater, error)
	once      sync.Once
}

// newWorld returns an Engine that has not started, with a layer of n files. The source waits until
// it is told otherwise.
func newWorld(t testing.TB, n int, change func(*Config)) *world {
	t.Helper()
	return newWorldOf(t, makeLayer(t, 1, n, blobindex.Gzip), change)
}

// newWorldOf is newWorld with another layer.
func newWorldOf(t testing.TB, layer *testLayer, change func(*Config)) *world {
	t.Helper()
	return newWorldWith(t, layer, change, nil)
}

// newWorldWith is newWorldOf with a proof of the layer's index.
func newWorldWith(t testing.TB, layer *testLayer, change func(*Config), prove Prove) *world {
	t.Helper()
	needKernel(t)
	root := testutil.DiskDir(t)
	w := &world{layer: layer, dir: filepath.Join(root, "layer")}
	first := make(chan struct{})
	w.source = &fakeSource{blob: w.layer.blob, wait: first, first: first}
	w.inflate = func() (Inflater, error) { w.inflaters.Add(1); return &fakeInflater{open: &w.inflaters}, nil }
	w.layer.write(t, w.dir)
	cfg := Config{Dir: root, Log: testutil.Logger(t), Retry: time.Millisecond, Sync: time.Millisecond, Proofs: 10, HashStep: 10_000}
	if change != nil {
		change(&cfg)
	}
	var err error
	w.e, err = Open(cfg)
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, w.e.Close()) })
	w.l, err = w.e.Add(w.dir, w.layer.x, w.source, func() (Inflater, error) { return w.inflate() }, prove)
	testutil.Must(t, err)
	return w
}

// open lets the source answer, also requests that wait already.
func (w *world) open() {
	w.source.set(nil, nil, false)
	w.once.Do(func() { close(w.source.first) })
}

// check compares all files below a root with the layer.
func (l *testLayer) check(root string, read func(path string) ([]byte, error)) error {
	for name, want := range l.files {
		got, err := read(filepath.Join(root, name))
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("%s has %d bytes with digest %x, want %d with %x", name, len(got), sha256.Sum256(got), len(want), sha256.Sum256(want))
		}
	}
	return nil
}

// wait waits for the layer's completion.
func (w *world) wait(t testing.TB) {
	t.Helper()
	select {
	case <-w.l.Done():
	case <-t.Context().Done():
	case <-time.After(time.Minute):
		t.Fatal("the layer is not complete in a minute")
	}
}

// readMap reads a file through a mapping. Page faults happen in system calls, see readMapped.
func readMap(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.Size() == 0 {
		return nil, err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	if err := unix.Madvise(mem, unix.MADV_POPULATE_READ); err != nil {
		return nil, errors.Join(err, unix.Munmap(mem))
	}
	return bytes.Clone(mem), unix.Munmap(mem)
}

// readDirect reads a file with O_DIRECT.
func readDirect(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EINVAL) { // not supported: nothing to test
		return os.ReadFile(path)
	}
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	mem, err := unix.Mmap(-1, 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Munmap(mem) }()
	var all []byte
	for {
		n, err := f.Read(mem)
		all = append(all, mem[:n]...)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// readSplice reads a file through splice(2).
func readSplice(path string) ([]byte, error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	done := make(chan error, 1)
	go func() {
		for {
			n, err := unix.Splice(int(in.Fd()), nil, int(w.Fd()), nil, 64<<10, 0)
			if n == 0 || err != nil {
				done <- errors.Join(err, w.Close())
				return
			}
		}
	}()
	all, err := io.ReadAll(r)
	return all, errors.Join(err, <-done)
}

// readSendfile reads a file through sendfile(2).
func readSendfile(path string) ([]byte, error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	fd, err := unix.MemfdCreate("out", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	out := os.NewFile(uintptr(fd), "out")
	defer out.Close()
	for {
		n, err := unix.Sendfile(fd, int(in.Fd()), nil, 1<<20)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			break
		}
	}
	return io.ReadAll(io.NewSectionReader(out, 0, 1<<40))
}
