package image_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"berth/image/blobindex"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack/inflate"
	"berth/image/unpack/tarsplit"
	"berth/internal/testutil"
)

// indexConfig is the configuration of a store that makes indexes.
func indexConfig(t *testing.T) pull.Config {
	t.Helper()
	cfg := with(driversConfig(t), "erofs", nil)
	cfg.IndexBytes = 64 << 20
	return cfg
}

// noise returns bytes that cannot be compressed.
func noise(size int, seed byte) []byte {
	data := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(data)
	return data
}

// framed returns a layer with one file, in many zstd frames.
func framed(t *testing.T, name string, content []byte) registrytest.Layer {
	t.Helper()
	data := tarOf(t, name, string(content))
	w, err := zstd.NewWriter(nil)
	testutil.Must(t, err)
	var blob []byte
	for part := range slices.Chunk(data, 300_000) {
		blob = append(blob, 0x50, 0x2a, 0x4d, 0x18, 4, 0, 0, 0, 'p', 'z', 's', 't') // a frame to skip
		blob = w.EncodeAll(part, blob)
	}
	blob = append(blob, make([]byte, 700)...) // padding
	return registrytest.Layer{Blob: blob, MediaType: ocispec.MediaTypeImageLayerZstd, DiffID: digest.FromBytes(data)}
}

// settle waits until the indexer has nothing to do.
func settle(t *testing.T, s *node) {
	t.Helper()
	testutil.Eventually(t, "all indexes are made", func() bool {
		return s.Lazy().Indexing() == 0
	})
	entries, err := os.ReadDir(filepath.Join(s.cfg.Root, "indexes"))
	testutil.Must(t, err)
	if n, _ := s.Indexes(); n != len(entries) {
		t.Errorf("%d indexes, %d entries", n, len(entries))
	}
}

func indexOf(t *testing.T, s *node, l registrytest.Layer) *blobindex.Index {
	t.Helper()
	settle(t, s)
	x, err := s.Lazy().IndexStore().Get(digest.FromBytes(l.Blob))
	testutil.Must(t, err)
	return x
}

// tarFrom restores a tar by an index from a blob alone, as a lazy layer does: it verifies each
// range and decompresses each span.
func tarFrom(t *testing.T, x *blobindex.Index, blob []byte) (tar []byte) {
	t.Helper()
	for i := range x.Spans() {
		span := x.Span(i)
		offset, size := x.GridRange(i, i)
		testutil.Must(t, x.Verify(offset, blob[offset:offset+size]))
		out := make([]byte, span.OutSize)
		testutil.Must(t, inflate.Span(x.Kind, &span.Point, blob[span.In:span.In+span.InSize], out, inflate.MaxWindow))
		tar = append(tar, out...)
	}
	return tar
}

// dataFrom is the content of files of a layer, restored from its tar.
type dataFrom map[int64][]byte

func (d dataFrom) ReadContent(at tarsplit.Ref, p []byte, offset int64) error {
	copy(p, d[at.Offset][offset:])
	return nil
}

// TestIndexRestoresTar pulls layers. Their indexes restore tar and files from the blob, also when
// the image is gone. Gzip needs berth-unpack with ISA-L: see the integration tests.
func TestIndexRestoresTar(t *testing.T) {
	cfg := indexConfig(t)
	reg := registrytest.New(t)
	content := noise(7<<20, 1)
	layers := []registrytest.Layer{plain(t, "plain", string(content)), framed(t, "zstd", content)}
	small := plain(t, "small", "text")
	reg.PutImage("image", "v1", "", append(layers, small)...)
	s := openStore(t, cfg)
	img := mustPull(t, s, reg.Host()+"/image:v1")
	settle(t, s)
	if n, _ := s.Indexes(); n != len(layers) {
		t.Fatalf("%d indexes of %d layers", n, len(layers))
	}
	testutil.Must(t, s.Remove(t.Context(), img.ID))
	s = restart(t, s, cfg)
	for _, l := range layers {
		x := indexOf(t, s, l)
		if x.Kind != blobindex.None && x.Spans() < 3 {
			t.Errorf("%s has %d spans", x.Kind, x.Spans())
		}
		tar := tarFrom(t, x, l.Blob)
		if digest.FromBytes(tar) != x.DiffID || x.DiffID != diffID(l) {
			t.Errorf("%s: another tar", x.Kind)
		}
		record, err := tarsplit.Open(bytes.NewReader(x.Record), int64(len(x.Record)), x.TarSize, dataFrom{0: content})
		testutil.Must(t, err)
		restored := make([]byte, x.TarSize)
		if _, err := record.ReadAt(restored, 0); err != nil || !bytes.Equal(restored, tar) {
			t.Errorf("%s: record restores another tar: %v", x.Kind, err)
		}
		if x.DataSize != int64(len(content)) || x.Summary.Inodes == 0 || x.Summary.Sum.IsZero() {
			t.Errorf("%s: %d bytes of data, %+v", x.Kind, x.DataSize, x.Summary)
		}
	}
}

// TestIndexOfResumedPull checks the states of a blob that two transfers have received.
func TestIndexOfResumedPull(t *testing.T) {
	cfg := indexConfig(t)
	cfg.PartialTTL, cfg.StallTimeout = time.Hour, 10*time.Second
	reg := registrytest.New(t)
	l := framed(t, "f", noise(7<<20, 2))
	reg.PutImage("image", "v1", "", l)
	c := cut(reg, l, 3<<20)
	s := openStore(t, cfg)
	failPull(t, s, reg.Host()+"/image:v1")
	settle(t, s)
	if n, _ := s.Indexes(); n != 0 {
		t.Errorf("%d indexes after a failed pull", n)
	}
	c.limit.Store(-1)
	mustPull(t, s, reg.Host()+"/image:v1")
	if c.ranges() == 0 {
		t.Error("the pull was not resumed")
	}
	tarFrom(t, indexOf(t, s, l), l.Blob)
}

// TestLayersWithoutIndex checks which layers get none: their pulls succeed.
func TestLayersWithoutIndex(t *testing.T) {
	content := noise(2<<20, 3)
	for name, tc := range map[string]struct {
		layer func(t *testing.T) registrytest.Layer
		cfg   func(*pull.Config)
	}{
		"disabled":          {layer: func(t *testing.T) registrytest.Layer { return framed(t, "f", content) }, cfg: func(c *pull.Config) { c.IndexBytes = 0 }},
		"directory":         {layer: func(t *testing.T) registrytest.Layer { return framed(t, "f", content) }, cfg: func(c *pull.Config) { c.Driver = "directory" }},
		"small":             {layer: func(t *testing.T) registrytest.Layer { return framed(t, "f", content[:1<<20/2]) }},
		"larger than limit": {layer: func(t *testing.T) registrytest.Layer { return framed(t, "f", content) }, cfg: func(c *pull.Config) { c.IndexBytes = 100 }},
		"one long frame": {layer: func(t *testing.T) registrytest.Layer {
			return zstandard(t, "f", string(slices.Concat(content, make([]byte, blobindex.MaxSpan))))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := indexConfig(t)
			if tc.cfg != nil {
				tc.cfg(&cfg)
			}
			reg := registrytest.New(t)
			reg.PutImage("image", "v1", "", tc.layer(t))
			s := openStore(t, cfg)
			mustPull(t, s, reg.Host()+"/image:v1")
			settle(t, s)
			if n, _ := s.Indexes(); n != 0 {
				t.Errorf("%d indexes", n)
			}
		})
	}
}

// TestIndexesAreDroppedForSpace checks that indexes go before a pull fails for lack of space, and
// are counted until then.
func TestIndexesAreDroppedForSpace(t *testing.T) {
	cfg := indexConfig(t)
	reg := registrytest.New(t)
	l := framed(t, "f", noise(7<<20, 4))
	reg.PutImage("image", "v1", "", l)
	s := openStore(t, cfg)
	img := mustPull(t, s, reg.Host()+"/image:v1")
	settle(t, s)
	_, bytes := s.Indexes()
	with, err := s.Usage(t.Context())
	testutil.Must(t, err)
	freed, err := s.DropIndexes()
	testutil.Must(t, err)
	without, err := s.Usage(t.Context())
	testutil.Must(t, err)
	if freed != bytes || freed == 0 || with.Bytes-without.Bytes != uint64(freed) {
		t.Errorf("%d of %d bytes freed, usage %d and %d", freed, bytes, with.Bytes, without.Bytes)
	}
	testutil.Must(t, s.Remove(t.Context(), img.ID))
	mustPull(t, s, reg.Host()+"/image:v1")
	indexOf(t, s, l)
	s.SettleFinished(nil, nil, fmt.Errorf("pull: %w", unix.ENOSPC))
	if n, _ := s.Indexes(); n != 0 {
		t.Errorf("%d indexes after a pull has filled the disk", n)
	}
}

// TestCorruptBlobHasNoIndex checks that nothing is kept of a blob with a wrong digest.
func TestCorruptBlobHasNoIndex(t *testing.T) {
	cfg := indexConfig(t)
	reg := registrytest.New(t)
	l := plain(t, "f", string(noise(2<<20, 5)))
	reg.PutImage("image", "v1", "", l)
	wrong := bytes.Clone(l.Blob)
	wrong[1<<20] ^= 1
	path := "/v2/image/blobs/" + digest.FromBytes(l.Blob).String()
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != path {
			return false
		}
		_, _ = w.Write(wrong)
		return true
	}
	s := openStore(t, cfg)
	failPull(t, s, reg.Host()+"/image:v1")
	settle(t, s)
	if n, _ := s.Indexes(); n != 0 {
		t.Errorf("%d indexes", n)
	}
}
