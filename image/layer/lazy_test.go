package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/lazy"
	"berth/image/lazy/index"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/checksum"
	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// lazyWorld is an EROFS store with an Engine.
type lazyWorld struct {
	t      testing.TB
	root   string
	engine *lazy.Engine
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

func (g *gate) fill(from Source, x *index.Index, claim *Claim) Filler {
	kind := x.Kind
	f := Filler{Source: gated{g, g.tars[from.Blob]}, Inflater: func() (lazy.Inflater, error) { return ownInflater(kind), nil }}
	if claim != nil {
		f.Prove = func(ctx context.Context, tar *io.SectionReader) error {
			g.proofs.Add(1)
			_, err := g.store().Prove(ctx, from.Name(), tar, unpack.Limits{})
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

// Range implements lazy.Source.
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
	engine, err := lazy.Open(lazy.Config{Dir: filepath.Dir(w.root), Log: discardLog()})
	if errors.Is(err, errors.ErrUnsupported) {
		w.t.Skip("NOT TESTED: ", err)
	}
	testutil.Must(w.t, err)
	w.engine = engine
	w.s, err = OpenLazy(w.root, NewEROFS(unpack.Pack, 0), Reserve{}, Lazy{Engine: engine, Fill: w.source.fill,
		Done: func(_ Source, _ *lazy.Layer, _ *Claim, err error) { w.done <- err }}, nil, discardLog())
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
func (w *lazyWorld) index(data []byte) (*index.Index, Source, Info) {
	w.t.Helper()
	eager := openImages(w.t, filepath.Join(testutil.DiskDir(w.t), "eager"), Reserve{})
	defer func() { testutil.Must(w.t, eager.Close()) }()
	id := digest.FromBytes(data)
	from := Source{Blob: id, DiffID: id}
	testutil.Must(w.t, eager.Create(w.t.Context(), from, bytes.NewReader(data), unpack.Limits{}))
	info, err := eager.Info(from.Name())
	testutil.Must(w.t, err)
	dir := eager.layerDir(from.Name())
	x := &index.Index{Blob: id, DiffID: id, BlobSize: int64(len(data)), TarSize: int64(len(data)), Kind: index.None,
		Summary: index.Summary{Bytes: info.Bytes, Inodes: info.Inodes, Opaque: info.Opaque, Whiteouts: info.Whiteouts, Sum: info.Sum}}
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
		x.Points = append(x.Points, index.Point{In: at, Out: at, Start: true})
	}
	h := index.NewHash()
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
			for _, f := range []string{indexFile, lazy.FilledFile} {
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

// claim makes an index one of another node, which is proven in the Store w.s.
func (w *lazyWorld) claimed(from Source, x *index.Index) (*Claim, Filler) {
	claim := &Claim{Peer: "192.0.2.1:80", Registry: "r.test", Profile: []int{1}}
	return claim, w.source.fill(from, x, claim)
}

// The index of another node is proven before the layer is complete, also by the next Store.
func TestClaimIsProven(t *testing.T) {
	for name, restarted := range map[string]bool{"same store": false, "restart": true} {
		t.Run(name, func(t *testing.T) {
			w := newLazyWorld(t)
			x, from, eager := w.index(bigTar(t, "one", "two", "d/three"))
			claim, fill := w.claimed(from, x)
			testutil.Must(t, w.s.CreateLazy(t.Context(), from, x, claim, fill))
			if restarted {
				w.reopen()
			}
			if got := w.s.Claimed(from.Name()); got == nil || got.Peer != claim.Peer || !slices.Equal(got.Profile, claim.Profile) {
				t.Errorf("claim %+v", got)
			}
			w.source.release()
			testutil.Must(t, <-w.done)
			if n := w.source.proofs.Load(); n != 1 {
				t.Errorf("%d proofs", n)
			}
			w.checkComplete(from.Name(), eager, "")
			if w.s.Claimed(from.Name()) != nil {
				t.Error("it still has a claim")
			}
			testutil.Eventually(t, "the trash is empty", func() bool { return len(entries(t, filepath.Join(w.root, trashDir))) == 0 })
			expectEmpty(t, filepath.Join(w.root, tmpDir))
		})
	}
}

// Whatever an index says that is not true of the tar is found.
func TestFalseClaims(t *testing.T) {
	data := bigTar(t, "one", "two", "d/three")
	for name, change := range map[string]func(t *testing.T, x *index.Index){
		"mode of a file": func(t *testing.T, x *index.Index) {
			root := decodeTree(t, x.Tree)
			root.Children["one"].Mode |= unix.S_ISUID
			x.Tree = encodeTree(t, root)
		},
		"name of a file": func(t *testing.T, x *index.Index) {
			root := decodeTree(t, x.Tree)
			root.Children["sh"] = root.Children["one"]
			delete(root.Children, "one")
			x.Tree = encodeTree(t, root)
		},
		"contents swapped": func(t *testing.T, x *index.Index) {
			root := decodeTree(t, x.Tree)
			root.Children["one"].Data, root.Children["two"].Data = root.Children["two"].Data, root.Children["one"].Data
			x.Tree = encodeTree(t, root)
		},
		"content that is not in the tar's place": func(t *testing.T, x *index.Index) { x.Record = literalRecord(t, data) },
		"more data":                              func(_ *testing.T, x *index.Index) { x.DataSize += 4096 },
		"whiteouts":                              func(_ *testing.T, x *index.Index) { x.Summary.Whiteouts++ },
		"opaque":                                 func(_ *testing.T, x *index.Index) { x.Summary.Opaque = true },
		"checksum":                               func(_ *testing.T, x *index.Index) { x.Summary.Sum = checksum.Sum{} },
	} {
		for _, restarted := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " restarted ", restarted), func(t *testing.T) {
				w := newLazyWorld(t)
				x, from, _ := w.index(data)
				change(t, x)
				x.TreeDigest, x.RecordDigest = digest.FromBytes(x.Tree), digest.FromBytes(x.Record)
				claim, fill := w.claimed(from, x)
				testutil.Must(t, w.s.CreateLazy(t.Context(), from, x, claim, fill))
				if restarted {
					w.reopen()
				}
				w.source.release()
				testutil.WantError(t, <-w.done, codes.DataLoss)
				if info, err := w.s.Info(from.Name()); err != nil || !info.Incomplete {
					t.Errorf("%+v, %v", info, err)
				}
				if got := <-w.reads("two", from.Name()); strings.HasPrefix(got, "two") {
					t.Error("its content can be read")
				}
				testutil.Must(t, w.s.Retire(from.Name()))
			})
		}
	}
}

// A layer with a claim cannot be created without a proof, nor the reverse.
func TestClaimNeedsProof(t *testing.T) {
	w := newLazyWorld(t)
	x, from, _ := w.index(bigTar(t, "one"))
	claim, fill := w.claimed(from, x)
	testutil.WantError(t, w.s.CreateLazy(t.Context(), from, x, nil, fill), codes.Internal)
	testutil.WantError(t, w.s.CreateLazy(t.Context(), from, x, claim, w.source.fill(from, x, nil)), codes.Internal)
}

// A damaged claim does not make the index a proven one.
func TestDamagedClaim(t *testing.T) {
	w := newLazyWorld(t)
	x, from, _ := w.index(bigTar(t, "one"))
	claim, fill := w.claimed(from, x)
	testutil.Must(t, w.s.CreateLazy(t.Context(), from, x, claim, fill))
	path := filepath.Join(w.s.layerDir(from.Name()), claimFile)
	w.close()
	testutil.Must(t, os.Truncate(path, 3))
	w.open()
	if w.s.Has(from.Name()) {
		t.Error("it is used")
	}
}

// The claims of layers are found when their store is not open, also of those set aside, and of
// those whose claim is damaged.
func TestClaims(t *testing.T) {
	w := newLazyWorld(t)
	var names []digest.Digest
	for i, file := range []string{"one", "two", "three"} {
		x, from, _ := w.index(bigTar(t, file))
		claim, fill := w.claimed(from, x)
		if i == 2 {
			claim, fill = nil, w.source.fill(from, x, nil)
		}
		testutil.Must(t, w.s.CreateLazy(t.Context(), from, x, claim, fill))
		names = append(names, from.Name())
	}
	check := func(what string, got map[digest.Digest]*Claim, want map[digest.Digest]string) {
		t.Helper()
		for name, peer := range want {
			if got[name] == nil || got[name].Peer != peer {
				t.Errorf("%s: layer %s has the claim %+v", what, name, got[name])
			}
		}
		if len(got) != len(want) {
			t.Errorf("%s: %d claims", what, len(got))
		}
	}
	w.close()
	testutil.Must(t, os.Truncate(filepath.Join(w.root, lazyDir, names[1].Encoded(), claimFile), 3))
	placed, aside, err := Claims(w.root)
	testutil.Must(t, err)
	check("placed", placed, map[digest.Digest]string{names[0]: "192.0.2.1:80", names[1]: ""})
	check("aside", aside, nil)
	testutil.Must(t, os.Truncate(filepath.Join(w.root, lazyDir, names[0].Encoded(), indexFile), 3))
	w.open()
	w.close()
	placed, aside, err = Claims(w.root)
	testutil.Must(t, err)
	check("placed", placed, nil)
	check("aside", aside, map[digest.Digest]string{names[0]: "192.0.2.1:80", names[1]: ""})
	w.open()
	if placed, aside, err := Claims(t.TempDir()); err != nil || len(placed)+len(aside) > 0 {
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

// literalRecord is a record of a tar that refers to no content of the layer.
func literalRecord(t *testing.T, tar []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	r := tarsplit.NewRecorder(bytes.NewReader(tar), &b)
	_, err := io.Copy(io.Discard, r)
	testutil.Must(t, err)
	kept, err := r.Finish()
	if err != nil || !kept {
		t.Fatal(kept, err)
	}
	return b.Bytes()
}
