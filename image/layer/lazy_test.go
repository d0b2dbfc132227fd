package layer

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/lazy/fill"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// lazyWorld is an EROFS store with an Engine.
type lazyWorld struct {
	t      testing.TB
	root   string
	engine *fill.Engine
	s      *Store
	source *gate
	done   chan error
}

// gate is a source that serves tars, which are their own blobs, when it is open.
type gate struct {
	mu   sync.Mutex // guards open
	open chan struct{}
	tars map[digest.Digest][]byte

	proofs     atomic.Int64
	afterProof func(context.Context) error // nil: nothing happens
	store      func() *Store
}

func (g *gate) fill(from Source, x *blobindex.Index, toc *TOC) Filler {
	kind := x.Kind
	f := Filler{Source: gated{g, g.tars[from.Blob]}, Inflater: func() (fill.Inflater, error) { return ownInflater(kind), nil }}
	if toc != nil {
		f.Prove = func(ctx context.Context, blob *io.SectionReader) error {
			g.proofs.Add(1)
			err := g.store().Prove(ctx, from.Name(), blob, unpack.Limits{})
			if err == nil && g.afterProof != nil {
				err = g.afterProof(ctx)
			}
			return err
		}
	}
	return f
}

func (g *gate) release() { close(g.now()) }

func (g *gate) now() chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open
}

// shut makes requests wait again.
func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = make(chan struct{})
}

type gated struct {
	*gate
	blob []byte
}

// Range implements fill.Source.
func (g gated) Range(ctx context.Context, offset, size int64) (io.ReadCloser, error) {
	select {
	case <-g.now():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return io.NopCloser(bytes.NewReader(g.blob[offset:][:size])), nil
}

func newLazyWorld(t testing.TB) *lazyWorld {
	t.Helper()
	w := &lazyWorld{t: t, root: filepath.Join(testutil.DiskDir(t), "store"), done: make(chan error, 16),
		source: &gate{open: make(chan struct{}), tars: map[digest.Digest][]byte{}}}
	w.source.store = func() *Store { return w.s }
	w.open()
	t.Cleanup(func() { w.close() })
	return w
}

// open opens the store, as a daemon does.
func (w *lazyWorld) open() {
	w.t.Helper()
	engine, err := fill.Open(fill.Config{Dir: filepath.Dir(w.root), Log: discardLog()})
	if errors.Is(err, errors.ErrUnsupported) {
		w.t.Skip("NOT TESTED: ", err)
	}
	testutil.Must(w.t, err)
	w.engine = engine
	w.s, err = OpenLazy(w.root, NewEROFS(unpack.Pack, 0), Reserve{}, Lazy{Engine: engine, Fill: w.source.fill,
		Done: func(_ Source, _ *fill.Layer, _ *TOC, err error) { w.done <- err }}, nil, discardLog())
	testutil.Must(w.t, err)
	engine.Start()
}

func (w *lazyWorld) close() {
	w.t.Helper()
	if w.s != nil {
		testutil.Must(w.t, w.s.Close())
		testutil.Must(w.t, w.engine.Close())
		w.s = nil
	}
}

func (w *lazyWorld) reopen() {
	w.t.Helper()
	w.close()
	w.open()
}

// index creates a layer in another store, and returns its index and source.
func (w *lazyWorld) index(data []byte) (*blobindex.Index, Source, Info) {
	w.t.Helper()
	eager := openImages(w.t, filepath.Join(testutil.DiskDir(w.t), "eager"), Reserve{})
	defer func() { testutil.Must(w.t, eager.Close()) }()
	id := digest.FromBytes(data)
	from := Source{Blob: id, DiffID: id}
	testutil.Must(w.t, eager.Create(w.t.Context(), from, bytes.NewReader(data), unpack.Limits{}))
	info, err := eager.Info(from.Name())
	testutil.Must(w.t, err)
	dir := eager.layerDir(from.Name())
	x := &blobindex.Index{Blob: id, DiffID: id, BlobSize: int64(len(data)), TarSize: int64(len(data)), Kind: blobindex.None,
		Summary: blobindex.Summary{Bytes: info.Bytes, Inodes: info.Inodes, Opaque: info.Opaque, Whiteouts: info.Whiteouts, Sum: info.Sum}}
	tree, err := os.ReadFile(filepath.Join(dir, treeFile))
	testutil.Must(w.t, err)
	record, err := os.ReadFile(filepath.Join(dir, tarFile))
	testutil.Must(w.t, err)
	x.TreeDigest, x.RecordDigest = digest.FromBytes(tree), digest.FromBytes(record)
	testutil.Must(w.t, x.SetFiles(tree, record))
	st, err := os.Stat(filepath.Join(dir, dataFile))
	testutil.Must(w.t, err)
	x.DataSize = st.Size()
	for at := int64(0); at < x.TarSize; at += 128 << 10 {
		x.Points = append(x.Points, blobindex.Point{In: at, Out: at, Start: true})
	}
	h := blobindex.NewHash()
	_, _ = h.Write(data)
	x.States, err = h.States(x.BlobSize)
	testutil.Must(w.t, err)
	w.source.tars[id] = data
	return x, from, info
}

// create creates an incomplete layer.
func (w *lazyWorld) create(data []byte) (digest.Digest, Info) {
	w.t.Helper()
	x, from, info := w.index(data)
	testutil.Must(w.t, w.s.CreateLazy(w.t.Context(), from, x, nil, w.source.fill(from, x, nil)))
	return from.Name(), info
}

func bigTar(t testing.TB, names ...string) []byte {
	t.Helper()
	entries := []header{dir("d", 0o711)}
	for i, name := range names {
		entries = append(entries, file(name, strings.Repeat(name, 40_000+i*5_000)))
	}
	return makeTar(t, entries...)
}

// reads reads a file of a chain of layers in the background.
func (w *lazyWorld) reads(name string, chain ...digest.Digest) <-chan string {
	w.t.Helper()
	layers, err := w.s.Stack(w.t.Context(), chain)
	testutil.Must(w.t, err)
	mount, err := rootfs.Spec{Layers: layers}.Mount()
	testutil.Must(w.t, err)
	got := make(chan string, 1)
	go func() {
		data, err := safefs.ReadFile(mount, name, 1<<20)
		if err = errors.Join(err, mount.Close()); err != nil {
			data = []byte(err.Error())
		}
		got <- string(data)
	}()
	return got
}

// A chain of incomplete layers can be used. When they are complete they are the same as others.
func TestLazyLayer(t *testing.T) {
	w := newLazyWorld(t)
	low, eager := w.create(bigTar(t, "one", "two", "three"))
	top, _ := w.create(bigTar(t, "two", "d/four"))
	chain := chainOf(low, top)
	info, err := w.s.Info(low)
	testutil.Must(t, err)
	if !info.Incomplete || !w.s.Incomplete(chain) || w.s.Lazy(low) == nil || !w.s.Has(low) || len(w.s.List()) != 2 {
		t.Errorf("%+v", info)
	}
	if used := w.s.Usage(); used.Bytes > eager.Bytes {
		t.Errorf("an empty layer takes %d bytes, a complete one %d", used.Bytes, eager.Bytes)
	}
	found, err := Inspect(w.root)
	testutil.Must(t, err)
	if len(found.Layers) != 2 || !found.Layers[low].Incomplete || len(found.Damaged) > 0 || len(found.Other) > 0 {
		t.Errorf("%+v", found)
	}
	one, two := w.reads("one", chain...), w.reads("two", chain...)
	testutil.Eventually(t, "readers wait", func() bool { return w.engine.Stats().Waiting >= 2 })
	oldPath := w.s.layerDir(low)
	w.source.release()
	if got := <-one; got != strings.Repeat("one", 40_000) {
		t.Errorf("%d bytes: %.100s", len(got), got)
	}
	if got := <-two; got != strings.Repeat("two", 40_000) { // of the upper layer
		t.Errorf("%d bytes: %.100s", len(got), got)
	}
	for range 2 {
		testutil.Must(t, <-w.done)
	}
	w.checkComplete(low, eager, oldPath)
	if got := <-w.reads("three", chain...); got != strings.Repeat("three", 50_000) {
		t.Errorf("%d bytes: %.100s", len(got), got)
	}
	w.reopen()
	w.checkComplete(low, eager, "")
	if links := entries(t, w.root, lazyDir); len(links) > 0 {
		t.Errorf("left after the next start: %q", links)
	}
	if got := <-w.reads("one", chain...); got != strings.Repeat("one", 40_000) {
		t.Errorf("%d bytes: %.100s", len(got), got)
	}
}

// checkComplete compares a layer with one that was unpacked from its blob.
func (w *lazyWorld) checkComplete(name digest.Digest, eager Info, oldPath string) {
	w.t.Helper()
	info, err := w.s.Info(name)
	testutil.Must(w.t, err)
	if info != eager {
		w.t.Errorf("%+v, unpacked it is %+v", info, eager)
	}
	if w.s.Lazy(name) != nil || w.s.Incomplete(chainOf(name)) {
		w.t.Error("it is incomplete")
	}
	checkSum(w.t, w.s, name)
	checkTar(w.t, w.s, name, w.source.tars[info.Blob])
	stored := Stored{Dir: w.s.layerDir(name), Kind: rootfs.EROFS}
	used, err := stored.Count(w.t.Context())
	testutil.Must(w.t, err)
	if used != info.Usage {
		w.t.Errorf("it takes %+v, recorded are %+v", used, info.Usage)
	}
	if got := entries(w.t, stored.Dir); !slices.Equal(got, []string{dataFile, recordFile, tarFile, treeFile}) {
		w.t.Errorf("files %q", got)
	}
	if oldPath == "" {
		return
	}
	if a, err := os.Stat(oldPath); err != nil {
		w.t.Errorf("the earlier path: %v", err)
	} else if b, err := os.Stat(stored.Dir); err != nil || !os.SameFile(a, b) {
		w.t.Errorf("the earlier path leads elsewhere: %v", err)
	}
}

// The next Store continues. Its marks are set before it returns.
func TestLazyLayerAfterRestart(t *testing.T) {
	w := newLazyWorld(t)
	name, eager := w.create(bigTar(t, "one", "two"))
	w.reopen()
	if info, err := w.s.Info(name); err != nil || !info.Incomplete {
		t.Fatalf("%+v, %v", info, err)
	}
	got := w.reads("two", name)
	testutil.Eventually(t, "the reader waits", func() bool { return w.engine.Stats().Waiting > 0 })
	w.source.release()
	if got := <-got; got != strings.Repeat("two", 45_000) {
		t.Errorf("%d bytes: %.100s", len(got), got)
	}
	testutil.Must(t, <-w.done)
	w.checkComplete(name, eager, "")
}

// A removed layer leaves nothing, complete or not.
func TestLazyLayerRemove(t *testing.T) {
	for _, complete := range []bool{false, true} {
		w := newLazyWorld(t)
		name, _ := w.create(bigTar(t, "one", "two"))
		_, err := w.s.Stack(t.Context(), chainOf(name))
		testutil.Must(t, err)
		if complete {
			w.source.release()
			testutil.Must(t, <-w.done)
		}
		l := w.s.Lazy(name)
		testutil.Must(t, w.s.Remove(name))
		if w.s.Has(name) || w.s.Lazy(name) != nil {
			t.Error("it exists")
		}
		if !complete {
			<-l.Done()
			w.s.lazy.life.Close()
			testutil.Must(t, w.s.lazy.life.Wait(t.Context())) // nothing waits for its completion
		}
		if len(w.done) > 0 {
			t.Errorf("told the owner: %v", <-w.done)
		}
		testutil.Eventually(t, "the trash is empty", func() bool { return w.s.Usage() == Usage{} })
		expectEmpty(t, filepath.Join(w.root, layersDir), filepath.Join(w.root, lazyDir), filepath.Join(w.root, joinsDir))
		if n := w.engine.Stats().Layers; n != 0 {
			t.Errorf("the engine has %d layers", n)
		}
	}
}

// Crashes between the steps of the completion leave a layer that the next Store completes.
func TestLazyLayerCrashes(t *testing.T) {
	hex := func(name digest.Digest) string { return name.Encoded() }
	for step, crash := range map[string]func(w *lazyWorld, name digest.Digest){
		"linked": func(w *lazyWorld, name digest.Digest) {
			testutil.Must(t, os.Symlink("../layers/"+hex(name), filepath.Join(w.root, layersDir, hex(name))))
		},
		"moved": func(w *lazyWorld, name digest.Digest) {
			w.source.release()
			w.open()
			testutil.Must(t, <-w.done)
			w.close()
			w.source.shut()
			for _, f := range []string{indexFile, fill.FilledFile} {
				testutil.Must(t, os.WriteFile(filepath.Join(w.root, layersDir, hex(name), f), nil, 0o600))
			}
		},
	} {
		t.Run(step, func(t *testing.T) {
			w := newLazyWorld(t)
			name, eager := w.create(bigTar(t, "one", "two"))
			w.close()
			crash(w, name)
			w.open()
			w.source.release()
			if info, err := w.s.Info(name); err != nil {
				t.Fatal(err)
			} else if info.Incomplete {
				testutil.Must(t, <-w.done)
			}
			w.checkComplete(name, eager, "")
		})
	}
}

// A layer with a damaged index or record is set aside. Reads of it fail.
func TestLazyLayerDamaged(t *testing.T) {
	for _, broken := range []string{indexFile, recordFile, tarFile, dataFile} {
		t.Run(broken, func(t *testing.T) {
			w := newLazyWorld(t)
			name, _ := w.create(bigTar(t, "one"))
			path := filepath.Join(w.s.layerDir(name), broken)
			w.close()
			if broken == tarFile {
				testutil.Must(t, os.Remove(path))
			} else {
				testutil.Must(t, os.Truncate(path, 1000))
			}
			w.open()
			if w.s.Has(name) {
				t.Error("it is used")
			}
			aside := filepath.Join(w.root, lazyDir, "set-aside")
			if got := entries(t, aside); len(got) != 1 {
				t.Fatalf("set aside: %q", got)
			}
			if _, err := os.ReadFile(filepath.Join(aside, entries(t, aside)[0], dataFile)); err == nil {
				t.Error("its data can be read")
			}
			testutil.Must(t, w.s.DropSetAside(nil))
			if _, err := os.Lstat(aside); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("after DropSetAside: %v", err)
			}
		})
	}
}

// A Store without an Engine discards incomplete layers, and creates none.
func TestLazyLayerWithoutEngine(t *testing.T) {
	w := newLazyWorld(t)
	data := bigTar(t, "one")
	name, _ := w.create(data)
	w.close()
	s := openImages(t, w.root, Reserve{})
	defer func() { testutil.Must(t, s.Close()) }()
	if s.Has(name) || s.Incomplete(chainOf(name)) || s.Lazy(name) != nil {
		t.Error("it exists")
	}
	expectEmpty(t, filepath.Join(w.root, lazyDir))
	x, from, _ := w.index(data)
	if err := s.CreateLazy(t.Context(), from, x, nil, Filler{}); errdefs.Code(err) != codes.FailedPrecondition {
		t.Error(err)
	}
}

// What is wrong before the layer exists leaves nothing.
func TestCreateLazyErrors(t *testing.T) {
	w := newLazyWorld(t)
	x, from, _ := w.index(bigTar(t, "one"))
	other := from
	other.DiffID = digest.FromString("other")
	testutil.WantError(t, w.s.CreateLazy(t.Context(), other, x, nil, Filler{}), codes.InvalidArgument)
	bad := *x
	bad.Points = nil
	testutil.WantError(t, w.s.CreateLazy(t.Context(), from, &bad, nil, Filler{}), codes.DataLoss)
	bad = *x
	bad.DataSize = 4096
	testutil.WantError(t, w.s.CreateLazy(t.Context(), from, &bad, nil, Filler{}), codes.DataLoss)
	testutil.Eventually(t, "nothing is left", func() bool { return w.s.Usage() == Usage{} })
	expectEmpty(t, filepath.Join(w.root, layersDir), filepath.Join(w.root, lazyDir), filepath.Join(w.root, tmpDir))
	testutil.Must(t, w.s.CreateLazy(t.Context(), from, x, nil, w.source.fill(from, x, nil)))
	testutil.Must(t, w.s.CreateLazy(t.Context(), from, x, nil, Filler{})) // it exists
}

// claimed returns an incomplete layer whose index another node has made, as earlier versions of
// berth left it.
func (w *lazyWorld) claimed(data []byte) digest.Digest {
	w.t.Helper()
	name, _ := w.create(data)
	claim := []byte(`{"peer":"192.0.2.1:80","registry":"r.test","profile":[1]}`)
	testutil.Must(w.t, os.WriteFile(filepath.Join(w.s.layerDir(name), tocFile), claim, 0o600))
	return name
}

// A layer whose index another node has made is not used, nor is one whose TOC is damaged. Its
// content cannot be read by containers that have it mounted.
func TestUnprovenLayerIsSetAside(t *testing.T) {
	for name, create := range map[string]func(w *lazyWorld) digest.Digest{
		"index of another node": func(w *lazyWorld) digest.Digest { return w.claimed(bigTar(t, "one")) },
		"damaged TOC": func(w *lazyWorld) digest.Digest {
			name := w.createByTable(tableOf(t, "one"), nil).Name()
			testutil.Must(t, os.Truncate(filepath.Join(w.s.layerDir(name), tocFile), 3))
			return name
		},
		"lost TOC": func(w *lazyWorld) digest.Digest {
			name := w.createByTable(tableOf(t, "one"), nil).Name()
			testutil.Must(t, os.Remove(filepath.Join(w.s.layerDir(name), tocFile)))
			return name
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newLazyWorld(t)
			name := create(w)
			w.reopen()
			if w.s.Has(name) {
				t.Error("it is used")
			}
			aside := filepath.Join(w.root, lazyDir, "set-aside")
			if got := entries(t, aside); len(got) != 1 {
				t.Fatalf("set aside: %q", got)
			}
			if _, err := os.ReadFile(filepath.Join(aside, entries(t, aside)[0], dataFile)); err == nil {
				t.Error("its data can be read")
			}
		})
	}
}

// Only an index of chunks has a table of contents.
func TestOwnIndexHasNoTOC(t *testing.T) {
	w := newLazyWorld(t)
	x, from, _ := w.index(bigTar(t, "one"))
	toc := &TOC{Registry: "r.test", Name: "table"}
	testutil.WantError(t, w.s.CreateLazy(t.Context(), from, x, toc, w.source.fill(from, x, toc)), codes.Internal)
}

// Layers that are not proven are found when their store is not open, also those set aside, and
// those whose TOC is damaged.
func TestUnproven(t *testing.T) {
	w := newLazyWorld(t)
	ofNode := w.claimed(bigTar(t, "one"))
	ofTable := w.createByTable(tableOf(t, "two"), nil).Name()
	damaged := w.createByTable(tableOf(t, "three"), nil).Name()
	w.create(bigTar(t, "four")) // needs no proof
	w.close()
	testutil.Must(t, os.Truncate(filepath.Join(w.root, lazyDir, damaged.Encoded(), tocFile), 3))
	check := func(what string, got []digest.Digest, want ...digest.Digest) {
		t.Helper()
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	placed, aside, err := Unproven(w.root)
	testutil.Must(t, err)
	check("placed", placed, ofNode, ofTable, damaged)
	check("aside", aside)
	w.open()
	w.close()
	placed, aside, err = Unproven(w.root)
	testutil.Must(t, err)
	check("placed", placed, ofTable)
	check("aside", aside, ofNode, damaged)
	w.open()
	if placed, aside, err := Unproven(t.TempDir()); err != nil || len(placed)+len(aside) > 0 {
		t.Errorf("of no store: %v, %v, %v", placed, aside, err)
	}
}

func decodeTree(t *testing.T, encoded []byte) *tree.Node {
	t.Helper()
	root, _, err := tree.Decode(bytes.NewReader(encoded), 0, tree.Limit{Bytes: 1 << 20, Memory: 1 << 20, Blocks: 1 << 20})
	testutil.Must(t, err)
	return root
}

func encodeTree(t *testing.T, root *tree.Node) []byte {
	t.Helper()
	var b bytes.Buffer
	testutil.Must(t, tree.Encode(&b, root))
	return b.Bytes()
}
