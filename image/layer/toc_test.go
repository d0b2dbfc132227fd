package layer

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/lazy/toc"
	"berth/image/lazy/toc/toctest"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// ownInflater decompresses spans in this process.
type ownInflater blobindex.Compression

// Span implements lazy.Inflater.
func (o ownInflater) Span(_ context.Context, p blobindex.Point, in []byte, out int64) ([]byte, error) {
	raw := make([]byte, out)
	if err := inflate.Span(blobindex.Compression(o), &p, in, raw, inflate.MaxWindow); err != nil {
		return nil, errdefs.New(codes.DataLoss, "%w", err)
	}
	return raw, nil
}

// Close implements lazy.Inflater.
func (ownInflater) Close() error { return nil }

// tableOf returns a blob with a table of contents.
func tableOf(t testing.TB, names ...string) *toctest.Blob {
	t.Helper()
	b, err := toctest.Stargz(bigTar(t, names...), toctest.Options{ChunkSize: 50_000})
	testutil.Must(t, err)
	return b
}

// createByTable creates an incomplete layer from the table of contents in a blob. change, if not
// nil, changes the index that was made of the table.
func (w *lazyWorld) createByTable(b *toctest.Blob, change func(*blobindex.Index)) Source {
	w.t.Helper()
	ctx := w.t.Context()
	from := Source{Blob: digest.FromBytes(b.Bytes), DiffID: b.DiffID}
	w.source.tars[from.Blob] = b.Bytes
	ref, ok := toc.Find(b.Descriptor())
	if !ok {
		w.t.Fatal("no table")
	}
	table, err := toc.Read(ctx, ref, toc.From{
		Fetch: func(_ context.Context, offset, size int64) ([]byte, error) {
			return slices.Clone(b.Bytes[offset:][:size]), nil
		},
		Inflate: func(ctx context.Context, kind blobindex.Compression, in []byte, out int64) ([]byte, error) {
			return ownInflater(kind).Span(ctx, blobindex.Point{Start: true}, in, out)
		},
	})
	testutil.Must(w.t, err)
	x := table.Index(from.Blob, from.DiffID)
	made, err := w.s.Outline(ctx, from, table.Outline(), unpack.Limits{})
	testutil.Must(w.t, err)
	root, _, err := tree.Decode(bytes.NewReader(made.Tree), 0, tree.Limit{Bytes: 1 << 20, Memory: 1 << 20, Blocks: 1 << 20})
	testutil.Must(w.t, err)
	testutil.Must(w.t, table.Place(root, made.DataSize))
	var placed bytes.Buffer
	testutil.Must(w.t, tree.Encode(&placed, root))
	x.Tree = placed.Bytes()
	if change != nil {
		change(x)
	}
	x.TreeDigest, x.RecordDigest = digest.FromBytes(x.Tree), digest.FromBytes(nil)
	named := &TOC{Registry: "registry.example", Name: ref.String()}
	testutil.Must(w.t, w.s.CreateLazy(ctx, from, x, named, w.source.fill(from, x, named)))
	return from
}

// Whatever a table says that is not true of the tar is found, also by the next Store.
func TestFalseTables(t *testing.T) {
	inTree := func(change func(root *tree.Node)) func(*blobindex.Index) {
		return func(x *blobindex.Index) {
			root := decodeTree(t, x.Tree)
			change(root)
			x.Tree = encodeTree(t, root)
		}
	}
	for name, change := range map[string]func(x *blobindex.Index){
		"mode of a file": inTree(func(root *tree.Node) { root.Children["one"].Mode |= unix.S_ISUID }),
		"name of a file": inTree(func(root *tree.Node) {
			root.Children["sh"] = root.Children["one"]
			delete(root.Children, "one")
		}),
		"contents swapped": inTree(func(root *tree.Node) {
			root.Children["one"].Data, root.Children["two"].Data = root.Children["two"].Data, root.Children["one"].Data
		}),
		"more data": func(x *blobindex.Index) { x.DataSize += 4096 },
		"whiteouts": func(x *blobindex.Index) { x.Summary.Whiteouts++ },
		"opaque":    func(x *blobindex.Index) { x.Summary.Opaque = true },
	} {
		for _, restarted := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " restarted ", restarted), func(t *testing.T) {
				w := newLazyWorld(t)
				from := w.createByTable(tableOf(t, "one", "two", "d/three"), change)
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

// The files of a layer are proven and replaced. A daemon that ends between that and the completion
// leaves a layer that the next one proves again.
func TestProofOfTableIsRepeated(t *testing.T) {
	for name, pack := range map[string]func([]byte, toctest.Options) (*toctest.Blob, error){
		"eStargz": toctest.Stargz, "zstd:chunked": toctest.Chunked,
	} {
		t.Run(name, func(t *testing.T) {
			w := newLazyWorld(t)
			b, err := pack(bigTar(t, "one", "two"), toctest.Options{ChunkSize: 50_000})
			testutil.Must(t, err)
			proven := make(chan struct{})
			w.source.afterProof = func(ctx context.Context) error {
				close(proven)
				<-ctx.Done()
				return ctx.Err()
			}
			from := w.createByTable(b, nil)
			w.source.release()
			<-proven
			w.source.afterProof = nil
			w.reopen()
			testutil.Must(t, <-w.done)
			if n := w.source.proofs.Load(); n != 2 {
				t.Errorf("%d proofs", n)
			}
			eager := openImages(t, filepath.Join(testutil.DiskDir(t), "eager"), Reserve{})
			defer func() { testutil.Must(t, eager.Close()) }()
			testutil.Must(t, eager.Create(t.Context(), from, bytes.NewReader(b.Bytes), unpack.Limits{}))
			info, err := eager.Info(from.Name())
			testutil.Must(t, err)
			w.source.tars[from.Blob] = b.Tar // what checkComplete compares
			w.checkComplete(from.Name(), info, "")
		})
	}
}
