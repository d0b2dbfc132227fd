package layer

import (
	"bytes"
	"context"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/lazy/index"
	"berth/image/lazy/toc"
	"berth/image/lazy/toc/toctest"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// ownInflater decompresses spans in this process.
type ownInflater index.Compression

// Span implements lazy.Inflater.
func (o ownInflater) Span(_ context.Context, p index.Point, in []byte, out int64) ([]byte, error) {
	raw := make([]byte, out)
	if err := inflate.Span(index.Compression(o), &p, in, raw, inflate.MaxWindow); err != nil {
		return nil, errdefs.New(codes.DataLoss, "%w", err)
	}
	return raw, nil
}

// Close implements lazy.Inflater.
func (ownInflater) Close() error { return nil }

// createByTable creates an incomplete layer from the table of contents in a blob.
func (w *lazyWorld) createByTable(b *toctest.Blob) Source {
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
		Inflate: func(ctx context.Context, kind index.Compression, in []byte, out int64) ([]byte, error) {
			return ownInflater(kind).Span(ctx, index.Point{Start: true}, in, out)
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
	x.Tree, x.TreeDigest, x.RecordDigest = placed.Bytes(), digest.FromBytes(placed.Bytes()), digest.FromBytes(nil)
	claim := &Claim{Registry: "registry.example", Table: ref.String()}
	testutil.Must(w.t, w.s.CreateLazy(ctx, from, x, claim, w.source.fill(from, x, claim)))
	return from
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
			from := w.createByTable(b)
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
