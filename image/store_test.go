package image_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image"
	"berth/image/governor"
	"berth/image/layer"
	"berth/image/peers"
	"berth/image/pull"
	"berth/image/registry"
	"berth/image/registry/registrytest"
	"berth/image/trust"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// node is a store and what pulls into it.
type node struct {
	*image.Store
	*pull.Puller
	cfg   pull.Config
	peers *peers.Peers     // nil: none
	log   *testutil.Buffer // nil: not kept
}

// Close ends the ambiguity of the two.
func (n *node) Close() error { return n.Puller.Close() }

// openStore opens a store that has seen all its holders, and closes it at the end.
func openStore(t *testing.T, cfg pull.Config) *node {
	t.Helper()
	s := openUnsettled(t, cfg, io.Discard)
	if err := s.CollectGarbage(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func openUnsettled(t *testing.T, cfg pull.Config, log io.Writer) *node {
	t.Helper()
	testutil.NeedRoot(t) // layers have owners
	if cfg.Root == "" {
		cfg.Root = t.TempDir()
	}
	if cfg.Unpack == nil {
		cfg.Unpack = unpack.Layer
	}
	s, err := open(t.Context(), cfg, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func open(ctx context.Context, cfg pull.Config, log *slog.Logger) (*node, error) {
	p, err := pull.Open(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	return &node{Store: p.Store(), Puller: p, cfg: cfg}, nil
}

// tarOf returns a tar with one file.
func tarOf(t *testing.T, name, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// plain returns an uncompressed layer with one file.
func plain(t *testing.T, name, content string) registrytest.Layer {
	return registrytest.Layer{Blob: tarOf(t, name, content)}
}

// gzipped is a layer with one file, gzipped.
func gzipped(t *testing.T, name, content string) registrytest.Layer {
	t.Helper()
	data := tarOf(t, name, content)
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return registrytest.Layer{Blob: b.Bytes(), MediaType: ocispec.MediaTypeImageLayerGzip, DiffID: digest.FromBytes(data)}
}

// zstandard is a layer with one file, in zstd.
func zstandard(t *testing.T, name, content string) registrytest.Layer {
	t.Helper()
	return zstandardOf(t, tarOf(t, name, content))
}

func zstandardOf(t *testing.T, data []byte) registrytest.Layer {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return registrytest.Layer{Blob: w.EncodeAll(data, nil), MediaType: ocispec.MediaTypeImageLayerZstd, DiffID: digest.FromBytes(data)}
}

func diffID(l registrytest.Layer) digest.Digest {
	if l.DiffID != "" {
		return l.DiffID
	}
	return digest.FromBytes(l.Blob)
}

func mustPull(t *testing.T, s *node, ref string) *image.Image {
	t.Helper()
	img, err := s.Pull(t.Context(), ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func wantCode(t *testing.T, err error, code codes.Code, texts ...string) {
	t.Helper()
	if got := errdefs.Code(err); got != code {
		t.Errorf("code %v, want %v: %v", got, code, err)
	}
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v does not contain %q", err, text)
		}
	}
}

// wantEmpty checks that a failed pull has left nothing.
func wantEmpty(t *testing.T, s *node) {
	t.Helper()
	if images := s.List(); len(images) != 0 {
		t.Errorf("%d images are left", len(images))
	}
	if layers := s.LayerNames(); len(layers) != 0 {
		t.Errorf("layers are left: %v", layers)
	}
	if owners := s.OwnerNames(); len(owners) != 0 {
		t.Errorf("owners are left: %v", owners)
	}
	if pulls := s.Progress(); len(pulls) != 0 {
		t.Errorf("pulls are left: %v", pulls)
	}
	entries, err := os.ReadDir(filepath.Join(s.cfg.Root, "tmp"))
	if err != nil || len(entries) != 0 {
		t.Errorf("temporary files are left: %v, %v", entries, err)
	}
}

// readFile reads a file of an image through its topmost layers.
func readFile(t *testing.T, s *node, img *image.Image, name string) string {
	t.Helper()
	spec, err := s.Hold("reader", img.Layers)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Release("reader"); err != nil {
			t.Error(err)
		}
	}()
	for _, l := range slices.Backward(spec.Layers) {
		for _, path := range []string{filepath.Join(l.Path, name), filepath.Join(l.Path, "fs", name), filepath.Join(l.Path, "root", name)} {
			if data, err := os.ReadFile(path); err == nil {
				return string(data)
			}
		}
	}
	t.Errorf("%s is not in the image", name)
	return ""
}

func TestPull(t *testing.T) {
	reg := registrytest.New(t)
	layers := []registrytest.Layer{
		plain(t, "plain", "a"), gzipped(t, "gzip", "b"), zstandard(t, "zstd", "c"),
		// Media types are known to lie.
		{Blob: gzipped(t, "lying", "d").Blob, DiffID: gzipped(t, "lying", "d").DiffID, MediaType: ocispec.MediaTypeImageLayerZstd},
	}
	for kind, put := range map[string]func(repo, tag, comment string, layers ...registrytest.Layer) ocispec.Descriptor{
		"oci": reg.PutImage, "docker": reg.PutDockerImage,
	} {
		t.Run(kind, func(t *testing.T) {
			s := openStore(t, pull.Config{})
			top := put("team/"+kind, "v1", kind, layers...)
			name := reg.Host() + "/team/" + kind
			img := mustPull(t, s, name+":v1")
			if !slices.Equal(img.RepoTags, []string{name + ":v1"}) || !slices.Equal(img.RepoDigests, []string{name + "@" + top.Digest.String()}) {
				t.Errorf("tags %q, digests %q", img.RepoTags, img.RepoDigests)
			}
			config, err := img.Specification()
			if err != nil {
				t.Fatal(err)
			}
			if len(img.Layers) != 4 || config.RootFS.DiffIDs[1] != layers[1].DiffID || img.Size == 0 || config.History[0].Comment != kind || img.Pinned {
				t.Errorf("got %+v", img)
			}
			for name, want := range map[string]string{"plain": "a", "gzip": "b", "zstd": "c", "lying": "d"} {
				if got := readFile(t, s, img, name); got != want {
					t.Errorf("%s holds %q, want %q", name, got, want)
				}
			}
			usage, err := s.Usage(t.Context())
			if err != nil || usage.Bytes < img.Size || usage.Inodes == 0 || usage.Mountpoint != s.cfg.Root {
				t.Errorf("usage %+v, %v", usage, err)
			}
			if err := s.Remove(t.Context(), img.ID); err != nil {
				t.Error(err)
			}
			wantEmpty(t, s)
		})
	}
}

// quietObserver ignores all measurements.
type quietObserver struct{}

func (quietObserver) Received(string, int)       {}
func (quietObserver) Slowed(time.Duration)       {}
func (quietObserver) ReadWaited(time.Duration)   {}
func (quietObserver) Pulled(string, pull.Result) {}

// slowObserver adds up how long pulls waited for their limit.
type slowObserver struct {
	quietObserver
	waited atomic.Int64
}

func (o *slowObserver) Slowed(waited time.Duration) { o.waited.Add(int64(waited)) }

func TestPullWaitsForBandwidth(t *testing.T) {
	reg := registrytest.New(t)
	content := make([]byte, 2*governor.Slowest)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(content) // never fails
	l := gzipped(t, "file", string(content))
	reg.PutImage("team/large", "v1", "", l)
	o := &slowObserver{}
	s := openStore(t, pull.Config{Observer: o, Governor: governor.Config{Bandwidth: governor.Slowest}})
	img := mustPull(t, s, reg.Host()+"/team/large:v1")
	if readFile(t, s, img, "file") != string(content) {
		t.Error("the file has another content")
	}
	// All but the bytes that may pass at once have to wait.
	if waited := time.Duration(o.waited.Load()); waited < time.Second {
		t.Errorf("%d bytes waited %v at %d bytes a second", len(l.Blob), waited, governor.Slowest)
	}
}

func TestGet(t *testing.T) {
	reg := registrytest.New(t)
	top := reg.PutImage("library/app", "v1", "", plain(t, "f", "1"))
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "docker.io"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "docker.io/hosts.toml"), fmt.Appendf(nil, "server = %q", reg.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, pull.Config{Settings: image.Settings{registry.Sources{Dirs: []string{dir}}, []string{"app:v1"}, trust.Config{}}})
	img := mustPull(t, s, "app:v1")
	hex := strings.TrimPrefix(img.ID, "sha256:")
	for _, ref := range []string{
		img.ID, hex, hex[:12], hex[:image.MinPrefix], "sha256:" + hex[:20],
		"app:v1", "library/app:v1", "docker.io/library/app:v1", "index.docker.io/app:v1",
		"app@" + top.Digest.String(), "app:v1@" + top.Digest.String(), "app:other@" + top.Digest.String(),
	} {
		if got, err := s.Get(ref); err != nil || got != img {
			t.Errorf("Get(%q) = %v, %v", ref, got, err)
		}
	}
	for _, ref := range []string{
		"app", "app:v2", "other", hex[:image.MinPrefix-1], "sha256:" + strings.Repeat("0", 64), "sha256:zz", "UPPER CASE",
		"other@" + top.Digest.String(), hex[:12] + "0000000", "../../etc/passwd",
	} {
		_, err := s.Get(ref)
		wantCode(t, err, codes.NotFound, "not found")
	}
	_, err := s.Get("")
	wantCode(t, err, codes.InvalidArgument)
	if !img.Pinned {
		t.Error("the image is not pinned")
	}
}

func TestPullByDigestHasNoTag(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	top := reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	name := reg.Host() + "/app"
	for _, ref := range []string{name + "@" + top.Digest.String(), name + ":v1@" + top.Digest.String()} {
		img := mustPull(t, s, ref)
		if len(img.RepoTags) != 0 || !slices.Equal(img.RepoDigests, []string{name + "@" + top.Digest.String()}) {
			t.Errorf("%s: tags %q, digests %q", ref, img.RepoTags, img.RepoDigests)
		}
	}
	img := mustPull(t, s, name+":v1")
	if !slices.Equal(img.RepoTags, []string{name + ":v1"}) || len(s.List()) != 1 {
		t.Errorf("tags %q of %d images", img.RepoTags, len(s.List()))
	}
}

// The space of an image is free when Remove returns, because kubelet reads the disk then.
func TestRemoveWaitsUntilSpaceIsFree(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range 3000 {
		testutil.Must(t, w.WriteHeader(&tar.Header{Name: fmt.Sprint(i), Mode: 0o644, Typeflag: tar.TypeReg}))
	}
	testutil.Must(t, w.Close())
	reg.PutImage("app", "v1", "", registrytest.Layer{Blob: b.Bytes()})
	mustPull(t, s, reg.Host()+"/app:v1")
	testutil.Must(t, s.Remove(t.Context(), reg.Host()+"/app:v1"))
	trash, err := os.ReadDir(filepath.Join(root, "trash"))
	testutil.Must(t, err)
	if len(trash) > 0 || s.Deleting() > 0 {
		t.Errorf("%d trees with %d bytes are being deleted", len(trash), s.Deleting())
	}
}

func TestTagMoves(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	name := reg.Host() + "/app"
	reg.PutImage("app", "v1", "first", plain(t, "f", "1"))
	first := mustPull(t, s, name+":v1")
	reg.PutImage("app", "v1", "second", plain(t, "f", "2"))
	second := mustPull(t, s, name+":v1")
	check := func(s *node) {
		t.Helper()
		old, err := s.Get(first.ID)
		if err != nil || len(old.RepoTags) != 0 || !slices.Equal(old.RepoDigests, first.RepoDigests) {
			t.Errorf("the old image is %+v, %v", old, err)
		}
		now, err := s.Get(name + ":v1")
		if err != nil || now.ID != second.ID || len(s.List()) != 2 {
			t.Errorf("the tag names %+v, %v", now, err)
		}
	}
	check(s)
	if first.RepoTags[0] != name+":v1" {
		t.Error("an image.Image that was handed out has changed")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	check(openStore(t, pull.Config{Root: root}))
}

// A loaded image is pinned until its last tag moves, also if berth stopped meanwhile. Its archive
// then counts as loaded while the new image exists.
func TestPinGoesWithTheLastTag(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	load := func(content, name string, opts pull.LoadOptions) *image.Image {
		t.Helper()
		images, err := s.Load(t.Context(), bytes.NewReader(dockerArchive(t, name, imageWith(t, content))), opts)
		testutil.Must(t, err)
		return images[0]
	}
	wantPinned := func(id string, want bool) {
		t.Helper()
		if img, err := s.Get(id); err != nil || img.Pinned != want {
			t.Errorf("%+v, %v; want pinned %v", img, err, want)
		}
	}
	first := load("1", "example.com/app:v1", pull.LoadOptions{Pin: true})
	_, err := s.Tag(t.Context(), first.ID, "example.com/app:latest")
	testutil.Must(t, err)
	load("2", "example.com/app:v1", pull.LoadOptions{})
	wantPinned(first.ID, true) // it has a tag left
	before := s.Snapshot().Records()[first.ID]
	second := load("2", "example.com/app:latest", pull.LoadOptions{})
	wantPinned(first.ID, false)
	wantPinned(second.ID, false)

	testutil.Must(t, s.Records().Write(image.RecordName(first.ID), before)) // as after a crash
	testutil.Must(t, s.Close())
	s = openStore(t, pull.Config{Root: root})
	wantPinned(first.ID, false)
	testutil.Must(t, s.Remove(t.Context(), second.ID))
	wantPinned(first.ID, false)
}

// TestInterruptedTagMoveIsSettled: berth stopped between the two writes of a moving tag.
func TestInterruptedTagMoveIsSettled(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	name := reg.Host() + "/app"
	reg.PutImage("app", "v1", "first", plain(t, "f", "1"))
	first := mustPull(t, s, name+":v1")
	before := s.Snapshot().Records()[first.ID]
	reg.PutImage("app", "v1", "second", plain(t, "f", "2"))
	second := mustPull(t, s, name+":v1")
	if err := s.Records().Write(image.RecordName(first.ID), before); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	log := &testutil.Buffer{}
	s = openUnsettled(t, pull.Config{Root: root}, log)
	img, err := s.Get(name + ":v1")
	if err != nil || img.ID != second.ID {
		t.Errorf("the tag names %+v, %v", img, err)
	}
	if old, err := s.Get(first.ID); err != nil || len(old.RepoTags) != 0 {
		t.Errorf("the old image is %+v, %v", old, err)
	}
	if !strings.Contains(log.String(), name+":v1") {
		t.Errorf("the log does not name the tag: %s", log)
	}
	// The tag does not come back after the new image was removed and another daemon has started.
	if err := s.Remove(t.Context(), second.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, pull.Config{Root: root})
	if old, err := s.Get(first.ID); err != nil || len(old.RepoTags) != 0 {
		t.Errorf("after the new image was removed the old one is %+v, %v", old, err)
	}
}

// TestLostTagOnFullDiskIsWrittenLater: a tag moved to another image, and the disk was too full to
// write the record of the first one.
func TestLostTagOnFullDiskIsWrittenLater(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	name := reg.Host() + "/app"
	reg.PutImage("app", "v1", "first", plain(t, "f", "1"))
	first := mustPull(t, s, name+":v1")
	inTheWay := filepath.Join(root, "records", "."+image.RecordName(first.ID)+".tmp", "x") // of where it is written first
	if err := os.MkdirAll(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	reg.PutImage("app", "v1", "second", plain(t, "f", "2"))
	second := mustPull(t, s, name+":v1")
	if len(s.Stale()) != 1 {
		t.Fatalf("records that could not be written: %v", s.Stale())
	}
	if err := os.RemoveAll(filepath.Dir(inTheWay)); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), second.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, pull.Config{Root: root})
	if old, err := s.Get(first.ID); err != nil || len(old.RepoTags) != 0 {
		t.Errorf("after the new image was removed the old one is %+v, %v", old, err)
	}
}

func TestRemove(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	name := reg.Host() + "/app"
	shared := plain(t, "shared", "x")
	reg.PutImage("app", "v1", "one", shared, plain(t, "f", "1"))
	reg.PutImage("app", "v2", "one", shared, plain(t, "f", "1"))
	reg.PutImage("app", "other", "two", shared, plain(t, "f", "2"))
	img := mustPull(t, s, name+":v1")
	if again := mustPull(t, s, name+":v2"); again.ID != img.ID || len(again.RepoTags) != 2 {
		t.Fatalf("got %+v", again)
	}
	other := mustPull(t, s, name+":other")
	for _, ref := range []string{"unknown:v1", img.ID[:20] + "0000", "sha256:" + strings.Repeat("0", 64)} {
		if err := s.Remove(t.Context(), ref); err != nil {
			t.Errorf("Remove(%q): %v", ref, err)
		}
	}
	if err := s.Remove(t.Context(), name+":v1"); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{name + ":v1", name + ":v2", img.ID} {
		_, err := s.Get(ref)
		wantCode(t, err, codes.NotFound)
	}
	if layers := s.LayerNames(); len(layers) != 2 {
		t.Errorf("%d layers are left, want the other image's 2", len(layers))
	}
	if err := s.Remove(t.Context(), other.ID[len("sha256:"):][:12]); err != nil {
		t.Fatal(err)
	}
	wantEmpty(t, s)
	if err := s.Remove(t.Context(), name+":v1"); err != nil {
		t.Errorf("removing again: %v", err)
	}
}

// A layer that cannot be deleted does not fail the removal of other images and containers. It is
// deleted when possible.
func TestRemoveSucceedsDespiteOtherFailedDeletions(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	reg.PutImage("torn", "v1", "torn", plain(t, "f", "1"), plain(t, "f", "2"))
	reg.PutImage("stuck", "v1", "stuck", plain(t, "f", "3"))
	reg.PutImage("app", "v1", "app", plain(t, "f", "4"), plain(t, "f", "5"))
	torn, stuck, app := mustPull(t, s, reg.Host()+"/torn:v1"), mustPull(t, s, reg.Host()+"/stuck:v1"), mustPull(t, s, reg.Host()+"/app:v1")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	layers := filepath.Join(root, "layers")
	for _, d := range torn.Layers {
		if err := os.WriteFile(filepath.Join(layers, d.Encoded(), "layer.json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	log := &testutil.Buffer{}
	s = openUnsettled(t, pull.Config{Root: root}, log)
	first := slices.Min(torn.Layers)
	aside := filepath.Join(layers, "set-aside", first.Encoded()+".0")
	own := filepath.Join(layers, stuck.Layers[0].Encoded())
	freeAside, freeOwn := immovable(t, aside), immovable(t, own)
	if err := s.CollectGarbage(t.Context()); err == nil || !strings.Contains(err.Error(), aside) {
		t.Errorf("what was set aside cannot be deleted: %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(layers, "set-aside")); err != nil || len(left) != 1 {
		t.Errorf("what can be deleted is there still: %v, %v", left, err)
	}

	if err := s.Remove(t.Context(), stuck.ID); err == nil || !strings.Contains(err.Error(), own) {
		t.Errorf("its own layer cannot be deleted: %v", err)
	}
	if _, err := s.Hold("ctr", app.Layers[:1]); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), app.ID); err != nil {
		t.Errorf("another image: %v", err)
	}
	if err := s.Release("ctr"); err != nil {
		t.Errorf("a container: %v", err)
	}
	for _, want := range []string{"will be retried", aside} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %q: %s", want, log)
		}
	}
	if got := s.LayerNames(); !slices.Equal(got, stuck.Layers) {
		t.Errorf("layers %v, want the one that cannot be deleted", got)
	}

	freeAside()
	freeOwn()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, pull.Config{Root: root})
	wantEmpty(t, s)
	if _, err := os.Stat(filepath.Dir(aside)); !os.IsNotExist(err) {
		t.Errorf("what was set aside is there still: %v", err)
	}
}

// immovable makes a directory one that cannot be renamed, until free is called.
func immovable(t *testing.T, dir string) (free func()) {
	t.Helper()
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	free = sync.OnceFunc(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(free)
	return free
}

func TestHeldLayersSurviveRemoval(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	reg.PutImage("app", "v1", "", plain(t, "f", "1"), plain(t, "g", "2"))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	for range 2 { // idempotent
		spec, err := s.Hold("ctr", img.Layers)
		if err != nil || len(spec.Layers) != 2 || spec.Upper != "" {
			t.Fatalf("%+v, %v", spec, err)
		}
	}
	if _, err := s.Hold("other", img.Layers[:1]); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	if n := len(s.LayerNames()); n != 2 {
		t.Errorf("%d layers while they are held, want 2", n)
	}
	if err := s.Release("ctr"); err != nil {
		t.Fatal(err)
	}
	if got := s.LayerNames(); !slices.Equal(got, img.Layers[:1]) {
		t.Errorf("layers %v, want the one that is still held", got)
	}
	for range 2 { // idempotent
		if err := s.Release("other"); err != nil {
			t.Fatal(err)
		}
	}
	wantEmpty(t, s)
	_, err := s.Hold("ctr", img.Layers)
	wantCode(t, err, codes.NotFound)
	wantEmpty(t, s)
}

func TestRestart(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	reg.PutImage("gone", "v1", "gone", plain(t, "g", "2"))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	gone := mustPull(t, s, reg.Host()+"/gone:v1")
	if _, err := s.Hold("ctr", gone.Layers); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), gone.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openUnsettled(t, pull.Config{Root: root}, io.Discard)
	got, err := s.Get(reg.Host() + "/app:v1")
	if err != nil || got.ID != img.ID || got.Size != img.Size || !slices.Equal(got.RepoDigests, img.RepoDigests) || !slices.Equal(got.Layers, img.Layers) {
		t.Errorf("got %+v, %v", got, err)
	}
	if content := readFile(t, s, got, "f"); content != "1" {
		t.Errorf("the file holds %q", content)
	}
	// The holder has not registered yet: whatever is released, its layer stays.
	if n := len(s.LayerNames()); n != 2 {
		t.Fatalf("%d layers before CollectGarbage, want 2", n)
	}
	if _, err := s.Hold("ctr", gone.Layers); err != nil {
		t.Fatal(err)
	}
	if err := s.CollectGarbage(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(s.LayerNames()); n != 2 {
		t.Errorf("%d layers while one is held, want 2", n)
	}
	if err := s.Release("ctr"); err != nil {
		t.Fatal(err)
	}
	if got := s.LayerNames(); !slices.Equal(got, img.Layers) {
		t.Errorf("layers %v, want the image's", got)
	}
}

// A container may run on layers even if one of them can no longer be mounted. The others must not
// be deleted then.
func TestFailedHoldKeepsLayers(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	reg.PutImage("app", "v1", "", plain(t, "f", "1"), plain(t, "g", "2"))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	if _, err := s.Hold("ctr", img.Layers); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	record := filepath.Join(root, "layers", img.Layers[1].Encoded(), "layer.json")
	if err := os.WriteFile(record, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = openUnsettled(t, pull.Config{Root: root}, io.Discard)
	_, err := s.Hold("ctr", img.Layers)
	wantCode(t, err, codes.NotFound)
	if err := s.CollectGarbage(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = s.Hold("ctr", img.Layers) // again, now that deleting is allowed
	wantCode(t, err, codes.NotFound)
	if err := s.Release("other"); err != nil { // sweeps
		t.Fatal(err)
	}
	if got := s.LayerNames(); !slices.Equal(got, img.Layers[:1]) {
		t.Errorf("layers %v, want the one that is left", got)
	}
	aside := filepath.Join(root, "layers", "set-aside")
	if _, err := os.Stat(filepath.Join(aside, img.Layers[1].Encoded()+".0", "fs", "g")); err != nil {
		t.Errorf("what the container runs on: %v", err)
	}
	if err := s.Release("ctr"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(aside); !os.IsNotExist(err) {
		t.Errorf("what nobody needs is set aside still: %v", err)
	}
	wantEmpty(t, s)
}

func TestDamagedRecordIsSetAside(t *testing.T) {
	reg := registrytest.New(t)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	reg.PutImage("other", "v1", "other", plain(t, "f", "2"))
	reg.PutImage("third", "v1", "third", plain(t, "f", "3"))
	broken, fine, hollow := mustPull(t, s, reg.Host()+"/app:v1"), mustPull(t, s, reg.Host()+"/other:v1"), mustPull(t, s, reg.Host()+"/third:v1")
	if err := s.Primary().Remove(hollow.Layers[0]); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "records", image.RecordName(broken.ID)+".record")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	log := &testutil.Buffer{}
	s = openUnsettled(t, pull.Config{Root: root}, log)
	if images := s.List(); len(images) != 1 || images[0].ID != fine.ID {
		t.Errorf("%d images", len(images))
	}
	for _, want := range []string{image.RecordName(broken.ID), image.RecordName(hollow.ID), "is missing", "checksum"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %q: %s", want, log)
		}
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("the record is still in its place: %v", err)
	}
	again := mustPull(t, s, reg.Host()+"/app:v1")
	if again.ID != broken.ID {
		t.Errorf("pulled again: %+v", again)
	}
}

func TestUnchangedTagIsNotFetchedAgain(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	gets := reg.Count("GET")
	if again := mustPull(t, s, reg.Host()+"/app:v1"); again != img || reg.Count("GET") != gets || reg.Count("HEAD") != 1 {
		t.Errorf("%d GET and %d HEAD more", reg.Count("GET")-gets, reg.Count("HEAD"))
	}
	// The registry decides who may have the image, also when it is here.
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool { w.WriteHeader(http.StatusForbidden); return true }
	for _, ref := range append(slices.Clone(img.RepoDigests), img.RepoTags...) {
		_, err := s.Pull(t.Context(), ref, nil)
		wantCode(t, err, codes.PermissionDenied, ref)
	}
}

func TestImageRemovedWhileItsTagIsChecked(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	reg.Before = func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodHead {
			if err := s.Remove(t.Context(), img.ID); err != nil {
				t.Error(err)
			}
		}
		return false
	}
	again := mustPull(t, s, reg.Host()+"/app:v1")
	if got, err := s.Get(again.ID); err != nil || got != again {
		t.Errorf("the image that was pulled: %+v, %v", got, err)
	}
	if content := readFile(t, s, again, "f"); content != "1" {
		t.Errorf("the file holds %q", content)
	}
}

func TestPresentLayersAreNotFetched(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", "x")
	reg.PutImage("app", "v1", "", base)
	reg.PutImage("app", "v2", "", base, plain(t, "f", "1"))
	mustPull(t, s, reg.Host()+"/app:v1")
	mustPull(t, s, reg.Host()+"/app:v2")
	if n := reg.Count("GET /v2/app/blobs/" + digest.FromBytes(base.Blob).String()); n != 1 {
		t.Errorf("the common layer was fetched %d times", n)
	}
}

func TestSameLayerTwiceInOneImage(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	a, b := plain(t, "f", "a"), plain(t, "f", "b")
	reg.PutImage("app", "v1", "", a, b, a)
	img := mustPull(t, s, reg.Host()+"/app:v1")
	if len(img.Layers) != 3 {
		t.Errorf("layers %v", img.Layers)
	}
	if got := readFile(t, s, img, "f"); got != "a" {
		t.Errorf("the file holds %q", got)
	}
	spec, err := s.Hold("ctr", img.Layers)
	if err != nil || len(spec.Layers) != 2 {
		t.Errorf("to mount: %+v, %v; overlayfs refuses a directory twice", spec, err)
	}
	if err := s.Remove(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.Release("ctr"); err != nil {
		t.Fatal(err)
	}
	wantEmpty(t, s)
}

func TestImageWithoutLayers(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	reg.PutImage("app", "v1", "")
	img := mustPull(t, s, reg.Host()+"/app:v1")
	if img.Size == 0 {
		t.Error("CRI wants a size")
	}
	spec, err := s.Hold("ctr", img.Layers)
	if err := errors.Join(err, s.Release("ctr")); err != nil || len(spec.Layers) > 0 {
		t.Errorf("%+v, %v", spec, err)
	}
}

// gate lets a test hold back the answers with one blob.
type gate struct {
	arrived chan struct{} // gets one value for each request
	open    chan struct{} // closed: answer
}

func gateBlob(reg *registrytest.Server, blob []byte) *gate {
	g := &gate{arrived: make(chan struct{}, 100), open: make(chan struct{})}
	path := digest.FromBytes(blob).String()
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, path) {
			g.arrived <- struct{}{}
			select {
			case <-g.open:
			case <-r.Context().Done():
			}
		}
		return false
	}
	return g
}

// pullLater starts a pull and returns where its error comes.
func pullLater(ctx context.Context, s *node, ref string) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := s.Pull(ctx, ref, nil)
		done <- err
	}()
	return done
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// downloading reports whether n pulls wait for the layer of a download.
func downloading(s *node, n int) func() bool {
	return func() bool {
		count := 0
		for _, p := range s.Progress() {
			for _, l := range p.Layers {
				if l.State == pull.LayerDownloading {
					count++
				}
			}
		}
		return count == n
	}
}

func TestConcurrentPullsShareDownload(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", strings.Repeat("x", 100_000))
	reg.PutImage("app", "v1", "one", base)
	reg.PutImage("other", "v1", "two", base)
	g := gateBlob(reg, base.Blob)
	one := pullLater(t.Context(), s, reg.Host()+"/app:v1")
	two := pullLater(t.Context(), s, reg.Host()+"/other:v1")
	eventually(t, "both pulls wait for the layer", downloading(s, 2))
	close(g.open)
	if err := <-one; err != nil {
		t.Error(err)
	}
	if err := <-two; err != nil {
		t.Error(err)
	}
	if n := downloads(reg, base); n != 1 || len(s.List()) != 2 {
		t.Errorf("%d downloads, %d images", n, len(s.List()))
	}
}

func TestCancelledPullDoesNotCancelTheOther(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", "x")
	reg.PutImage("app", "v1", "one", base)
	reg.PutImage("other", "v1", "two", base)
	g := gateBlob(reg, base.Blob)
	ctx, cancel := context.WithCancel(t.Context())
	one := pullLater(ctx, s, reg.Host()+"/app:v1")
	<-g.arrived
	two := pullLater(t.Context(), s, reg.Host()+"/other:v1")
	eventually(t, "both pulls wait for the layer", downloading(s, 2))
	cancel()
	wantCode(t, <-one, codes.Canceled)
	close(g.open)
	if err := <-two; err != nil {
		t.Error(err)
	}
	if n := downloads(reg, base); n != 1 {
		t.Errorf("%d downloads", n)
	}
}

func TestLastCancelledPullEndsTheDownload(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", "x")
	reg.PutImage("app", "v1", "", base)
	g := gateBlob(reg, base.Blob)
	ctx, cancel := context.WithCancel(t.Context())
	one := pullLater(ctx, s, reg.Host()+"/app:v1")
	<-g.arrived
	cancel()
	wantCode(t, <-one, codes.Canceled)
	wantEmpty(t, s) // the download has really ended
	close(g.open)
	mustPull(t, s, reg.Host()+"/app:v1")
}

func TestCloseEndsPulls(t *testing.T) {
	reg := registrytest.New(t)
	s, err := open(t.Context(), pull.Config{Root: t.TempDir(), Unpack: unpack.Layer}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	base := gzipped(t, "base", "x")
	reg.PutImage("app", "v1", "", base)
	g := gateBlob(reg, base.Blob)
	defer close(g.open)
	one := pullLater(t.Context(), s, reg.Host()+"/app:v1")
	<-g.arrived
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	wantCode(t, <-one, codes.Canceled)
	_, err = s.Pull(t.Context(), reg.Host()+"/app:v1", nil)
	wantCode(t, err, codes.Unavailable, "closed")
}

// TestFailedDownloadOfAnotherPull: the second pull has credentials that the first
// one lacks, so it does not fail with it.
func TestFailedDownloadOfAnotherPull(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", "x")
	reg.PutImage("app", "v1", "", base)
	arrived, answer := make(chan struct{}, 10), make(chan struct{})
	path := digest.FromBytes(base.Blob).String()
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, path) {
			return false
		}
		if r.Header.Get("Authorization") != "" {
			return false
		}
		arrived <- struct{}{}
		<-answer
		w.WriteHeader(http.StatusForbidden)
		return true
	}
	one := pullLater(t.Context(), s, reg.Host()+"/app:v1")
	<-arrived
	two := make(chan error, 1)
	go func() {
		_, err := s.Pull(t.Context(), reg.Host()+"/app:v1", &runtimeapi.AuthConfig{RegistryToken: "t"})
		two <- err
	}()
	eventually(t, "both pulls wait for the layer", downloading(s, 2))
	close(answer)
	wantCode(t, <-one, codes.PermissionDenied)
	if err := <-two; err != nil {
		t.Error(err)
	}
}

// A panic ends only the pull in which it occurs.
func TestPanicEndsThePull(t *testing.T) {
	reg := registrytest.New(t)
	var once sync.Once
	s := openStore(t, pull.Config{Unpack: func(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
		once.Do(func() { panic("oh") })
		return unpack.Layer(ctx, tree, blob, job)
	}})
	reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	_, err := s.Pull(t.Context(), reg.Host()+"/app:v1", nil)
	wantCode(t, err, codes.Internal, "oh")
	wantEmpty(t, s)
	mustPull(t, s, reg.Host()+"/app:v1")
}

func TestLayersAreFetchedAtOnce(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	layers := []registrytest.Layer{gzipped(t, "a", "1"), gzipped(t, "b", "2"), gzipped(t, "c", "3"), gzipped(t, "d", "4")}
	reg.PutImage("app", "v1", "", layers...)
	var all sync.WaitGroup
	all.Add(len(layers))
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		for _, l := range layers {
			if strings.HasSuffix(r.URL.Path, digest.FromBytes(l.Blob).String()) {
				all.Done()
				all.Wait() // answered only when all have been asked for
			}
		}
		return false
	}
	mustPull(t, s, reg.Host()+"/app:v1")
}

func TestProgress(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{MaxParallelDownloads: 1})
	here, held, last := plain(t, "here", "x"), gzipped(t, "held", "y"), gzipped(t, "last", "z")
	reg.PutImage("app", "v0", "", here)
	reg.PutImage("app", "v1", "", here, held, last)
	mustPull(t, s, reg.Host()+"/app:v0")
	g := gateBlob(reg, held.Blob)
	done := pullLater(t.Context(), s, reg.Host()+"/app:v1")
	<-g.arrived
	eventually(t, "the layer is being fetched", downloading(s, 1))
	p := s.Progress()
	if len(p) != 1 || p[0].Ref != reg.Host()+"/app:v1" || p[0].Started.IsZero() || len(p[0].Layers) != 3 {
		t.Fatalf("progress %+v", p)
	}
	size := func(l registrytest.Layer) int64 { return int64(len(l.Blob)) }
	want := []pull.LayerProgress{
		{Digest: digest.FromBytes(here.Blob), State: pull.LayerPresent, Done: size(here), Total: size(here)},
		{Digest: digest.FromBytes(held.Blob), State: pull.LayerDownloading, Total: size(held)},
		{Digest: digest.FromBytes(last.Blob), State: pull.LayerWaiting, Total: size(last)},
	}
	if !slices.Equal(p[0].Layers, want) {
		t.Errorf("layers\n%+v, want\n%+v", p[0].Layers, want)
	}
	close(g.open)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if p := s.Progress(); len(p) != 0 {
		t.Errorf("progress of no pull: %+v", p)
	}
}

func TestPullFailures(t *testing.T) {
	good := gzipped(t, "f", strings.Repeat("content ", 10_000))
	cut := good
	cut.Blob = good.Blob[:len(good.Blob)/2]
	wrongDiffID := good
	wrongDiffID.DiffID = digest.FromString("something else")
	noTar := registrytest.Layer{Blob: bytes.Repeat([]byte("no tar "), 1000)}
	blobPath := digest.FromBytes(good.Blob).String()
	serve := func(status int, change func([]byte) []byte) func(w http.ResponseWriter, r *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, blobPath) {
				return false
			}
			w.WriteHeader(status)
			_, _ = w.Write(change(bytes.Clone(good.Blob)))
			return true
		}
	}
	for name, c := range map[string]struct {
		layer  registrytest.Layer
		before func(w http.ResponseWriter, r *http.Request) bool
		code   codes.Code
		texts  []string
	}{
		"truncated gzip":  {layer: cut, code: codes.DataLoss, texts: []string{digest.FromBytes(cut.Blob).String(), "decompress"}},
		"wrong diffID":    {layer: wrongDiffID, code: codes.DataLoss, texts: []string{wrongDiffID.DiffID.String()}},
		"not a tar":       {layer: noTar, code: codes.InvalidArgument},
		"corrupted blob":  {layer: good, before: serve(200, func(b []byte) []byte { b[len(b)-10] ^= 1; return b }), code: codes.DataLoss, texts: []string{blobPath}},
		"wrong size":      {layer: good, before: serve(200, func(b []byte) []byte { return b[1:] }), code: codes.DataLoss, texts: []string{blobPath, "size is"}},
		"layer not found": {layer: good, before: serve(404, func(b []byte) []byte { return nil }), code: codes.NotFound, texts: []string{blobPath}},
		"layer forbidden": {layer: good, before: serve(403, func(b []byte) []byte { return nil }), code: codes.PermissionDenied, texts: []string{blobPath}},
	} {
		t.Run(name, func(t *testing.T) {
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", plain(t, "base", "x"), c.layer)
			reg.Before = c.before
			s := openStore(t, pull.Config{})
			ref := reg.Host() + "/app:v1"
			_, err := s.Pull(t.Context(), ref, nil)
			wantCode(t, err, c.code, append(c.texts, "pull "+ref)...)
			wantEmpty(t, s)
		})
	}
}

// A few kilobytes of zstd can hold any number of bytes. The length of the tar is limited, whatever
// the blob's.
func TestDecompressionBomb(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{Limits: unpack.Limits{Tar: 1 << 20}})
	bomb := zstandard(t, "f", strings.Repeat("\x00", 2<<20))
	reg.PutImage("app", "v1", "", bomb)
	_, err := s.Pull(t.Context(), reg.Host()+"/app:v1", nil)
	wantCode(t, err, codes.FailedPrecondition, digest.FromBytes(bomb.Blob).String(), "longer than the 1048576 bytes")
	wantEmpty(t, s)
	if n := fetches(reg, bomb); n != 1 {
		t.Errorf("it was fetched %d times", n)
	}
}

// useradd with a large UID makes a lastlog of zeros (moby#5419). zstd compresses it by any ratio,
// and on disk its zeros are a hole.
func TestLayerOfZeros(t *testing.T) {
	const size = 88 << 20
	for _, driver := range []string{"directory", "erofs"} {
		t.Run(driver, func(t *testing.T) {
			cfg := driversConfig(t)
			reg := registrytest.New(t)
			zeros := zstandard(t, "lastlog", strings.Repeat("\x00", size))
			if ratio := size / len(zeros.Blob); ratio < 5000 {
				t.Fatalf("its ratio is %d", ratio)
			}
			reg.PutImage("app", "v1", "", zeros)
			s := restart(t, nil, with(cfg, driver, nil))
			img := mustPull(t, s, reg.Host()+"/app:v1")
			if img.Size > 1<<20 {
				t.Errorf("it takes %d bytes", img.Size)
			}
		})
	}
}

// A blob that is longer than its layer may be is not even asked for.
func TestBlobTooLong(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{Limits: unpack.Limits{Tar: 1 << 20}})
	long, fits := plain(t, "f", strings.Repeat("x", 3<<20)), plain(t, "f", strings.Repeat("x", 1<<20-1536))
	reg.PutImage("long", "v1", "", long)
	reg.PutImage("fits", "v1", "", fits)
	_, err := s.Pull(t.Context(), reg.Host()+"/long:v1", nil)
	wantCode(t, err, codes.FailedPrecondition, diffID(long).String(), fmt.Sprint(len(long.Blob)))
	if n := reg.Count("GET /v2/long/blobs/" + diffID(long).String()); n != 0 {
		t.Errorf("it was asked for %d times", n)
	}
	mustPull(t, s, reg.Host()+"/fits:v1")
}

// An image that cannot fit is not fetched; one whose layers are here needs no room.
func TestPullChecksFreeSpaceFirst(t *testing.T) {
	reg := registrytest.New(t)
	here, missing := plain(t, "f", "1"), plain(t, "f", "2")
	reg.PutImage("app", "v1", "", here)
	reg.PutImage("app", "v2", "of the same layer, twice", here, here)
	reg.PutImage("app", "v3", "with another", here, missing)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	mustPull(t, s, reg.Host()+"/app:v1")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, pull.Config{Root: root, Reserve: layer.Reserve{Percent: 100, Bytes: math.MaxInt64}}) // with an image the disk is not empty
	_, err := s.Pull(t.Context(), reg.Host()+"/app:v3", nil)
	wantCode(t, err, codes.ResourceExhausted, "no space left on device", "kept free")
	if n := reg.Count("GET /v2/app/blobs/" + diffID(missing).String()); n != 0 {
		t.Errorf("it was asked for %d times", n)
	}
	if len(s.LayerNames()) != 1 {
		t.Errorf("layers %v", s.LayerNames())
	}
	mustPull(t, s, reg.Host()+"/app:v2")
}

func TestPullBadReferences(t *testing.T) {
	s := openStore(t, pull.Config{})
	for _, ref := range []string{"", "a/UPPER", "app@sha256:1", "../../etc"} {
		_, err := s.Pull(t.Context(), ref, nil)
		wantCode(t, err, codes.InvalidArgument)
	}
	_, err := s.Pull(t.Context(), "app", &runtimeapi.AuthConfig{Auth: "%"})
	wantCode(t, err, codes.InvalidArgument)
	reg := registrytest.New(t)
	_, err = s.Pull(t.Context(), reg.Host()+"/unknown:v1", nil)
	wantCode(t, err, codes.NotFound, "pull "+reg.Host()+"/unknown:v1", "not found")
	wantEmpty(t, s)
}

// TestRegistryUnavailable: what kubelet does with the error of a PullImage call
// (cri-client strips codes.Unknown, image_manager.go matches the prefix).
func TestRegistryUnavailable(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	ref := reg.Host() + "/app:v1"
	reg.Close()
	_, err := s.Pull(t.Context(), ref, nil)
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.Unknown || !strings.HasPrefix(st.Message(), crierrors.ErrRegistryUnavailable.Error()+": ") {
		t.Errorf("got %v", err)
	}
	wantCode(t, err, codes.Unknown, "pull "+ref, "connection refused")
	wantEmpty(t, s)
}

func TestStalledLayer(t *testing.T) {
	reg := registrytest.New(t)
	layer := gzipped(t, "f", strings.Repeat("x", 1000))
	reg.PutImage("app", "v1", "", layer)
	end := make(chan struct{})
	defer close(end)
	path := digest.FromBytes(layer.Blob).String()
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, path) {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(layer.Blob)))
		_, _ = w.Write(layer.Blob[:20])
		w.(http.Flusher).Flush()
		<-end
		return true
	}
	s := openStore(t, pull.Config{StallTimeout: 2 * time.Second}) // on a slow machine, too, the rest of the pull is faster
	var err error
	for range 10 { // something else may have stalled on a busy machine
		if _, err = s.Pull(t.Context(), reg.Host()+"/app:v1", nil); err == nil || strings.Contains(err.Error(), "at byte 20 of") {
			break
		}
	}
	wantCode(t, err, codes.Unknown, "RegistryUnavailable: pull", path, "at byte 20 of", "transfer stalled")
	wantEmpty(t, s)
}

// TestCorruptMirror: if one host serves corrupt content, it is fetched from the next host, whatever
// the error looks like.
func TestCorruptMirror(t *testing.T) {
	large := plain(t, "f", strings.Repeat("content ", 1<<20)) // more than pipes and buffers hold
	for name, tt := range map[string]struct {
		layer registrytest.Layer
		at    int // the byte that the mirror has changed
	}{
		"compressed":      {gzipped(t, "f", strings.Repeat("content ", 10_000)), 100},
		"tar's header":    {large, 0},
		"size of a file":  {large, 124},
		"content":         {large, 1 << 20},
		"tar's last byte": {large, len(large.Blob) - 1},
	} {
		t.Run(name, func(t *testing.T) {
			server, mirror := registrytest.New(t), registrytest.New(t)
			server.PutImage("app", "v1", "", tt.layer)
			mirror.PutImage("app", "v1", "", tt.layer)
			path := digest.FromBytes(tt.layer.Blob).String()
			mirror.Before = func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, path) {
					return false
				}
				bad := bytes.Clone(tt.layer.Blob)
				bad[tt.at] ^= 1
				_, _ = w.Write(bad)
				return true
			}
			s := openStore(t, pull.Config{Settings: image.Settings{Registries: registry.Sources{Dirs: []string{mirrored(t, server, mirror)}}}})
			mustPull(t, s, "example.com/app:v1")
			if mirror.Count(path) != 1 || server.Count(path) != 1 {
				t.Errorf("mirror was asked %d times, server %d times", mirror.Count(path), server.Count(path))
			}
		})
	}
}

// The next host is asked also if the unpacker stopped the blob when it refused it.
func TestCorruptBlobIsReadToItsEnd(t *testing.T) {
	server, mirror := registrytest.New(t), registrytest.New(t)
	large := plain(t, "f", strings.Repeat("content ", 1<<20))
	server.PutImage("app", "v1", "", large)
	mirror.PutImage("app", "v1", "", large)
	path := diffID(large).String()
	mirror.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, path) {
			return false
		}
		bad := bytes.Clone(large.Blob)
		bad[0] ^= 1
		_, _ = w.Write(bad)
		return true
	}
	s := openStore(t, pull.Config{
		Settings: image.Settings{Registries: registry.Sources{Dirs: []string{mirrored(t, server, mirror)}}},
		Unpack: func(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
			defer blob.(unpack.Stopper).Stop()
			return unpack.Layer(ctx, tree, blob, job)
		},
	})
	mustPull(t, s, "example.com/app:v1")
	if server.Count(path) != 1 {
		t.Errorf("server was asked %d times", server.Count(path))
	}
}

// While the store finds out whether the host or the image caused a refused layer, other layers of
// the registry are unpacked.
func TestRejectedLayerDelaysNoOthers(t *testing.T) {
	server, mirror := registrytest.New(t), registrytest.New(t)
	bad := registrytest.Layer{Blob: bytes.Repeat([]byte("no tar "), 1<<20)}
	for _, reg := range []*registrytest.Server{server, mirror} {
		reg.PutImage("app", "v1", "", bad)
		reg.PutImage("other", "v1", "", plain(t, "f", "1"))
	}
	path := diffID(bad).String()
	sent, goOn := make(chan struct{}), make(chan struct{})
	mirror.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, path) {
			return false
		}
		half := len(bad.Blob) / 2 // more than is read ahead
		w.Header().Set("Content-Length", fmt.Sprint(len(bad.Blob)))
		_, _ = w.Write(bad.Blob[:half])
		w.(http.Flusher).Flush()
		close(sent)
		<-goOn
		_, _ = w.Write(bad.Blob[half:])
		return true
	}
	s := openStore(t, pull.Config{Settings: image.Settings{Registries: registry.Sources{Dirs: []string{mirrored(t, server, mirror)}}}, MaxUnpacking: 1, StallTimeout: time.Hour})
	refused := pullLater(t.Context(), s, "example.com/app:v1")
	<-sent
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute/2)
	defer cancel()
	if _, err := s.Pull(ctx, "example.com/other:v1", nil); err != nil {
		t.Error(err)
	}
	close(goOn)
	wantCode(t, <-refused, codes.InvalidArgument, "invalid tar header")
}

// A rejected layer is not fetched from other hosts, because its blob had the right digest.
func TestRejectedLayerIsFetchedOnce(t *testing.T) {
	server, mirror := registrytest.New(t), registrytest.New(t)
	bad := registrytest.Layer{Blob: bytes.Repeat([]byte("no tar "), 1<<20)}
	server.PutImage("app", "v1", "", bad)
	mirror.PutImage("app", "v1", "", bad)
	s := openStore(t, pull.Config{Settings: image.Settings{Registries: registry.Sources{Dirs: []string{mirrored(t, server, mirror)}}}})
	_, err := s.Pull(t.Context(), "example.com/app:v1", nil)
	wantCode(t, err, codes.InvalidArgument, "invalid tar header")
	if path := diffID(bad).String(); mirror.Count(path) != 1 || server.Count(path) != 0 {
		t.Errorf("mirror was asked %d times, server %d times", mirror.Count(path), server.Count(path))
	}
}

// mirrored returns a directory of hosts for example.com, which is server and has a mirror.
func mirrored(t *testing.T, server, mirror *registrytest.Server) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "example.com"), 0o755); err != nil {
		t.Fatal(err)
	}
	hosts := fmt.Appendf(nil, "server = %q\n[host.%q]", server.URL, mirror.URL)
	if err := os.WriteFile(filepath.Join(dir, "example.com/hosts.toml"), hosts, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestOpenRefusesBadConfig(t *testing.T) {
	for _, cfg := range []pull.Config{{Settings: image.Settings{Pinned: []string{"a/UPPER"}}}, {Driver: "zfs"}} {
		cfg.Root = t.TempDir()
		_, err := open(t.Context(), cfg, slog.New(slog.DiscardHandler))
		wantCode(t, err, codes.InvalidArgument)
	}
}

// Prepare changes the registries and the pinned images of an open store. It refuses faulty names.
func TestPrepareChangesOpenStore(t *testing.T) {
	reg := registrytest.New(t)
	reg.PutImage("library/app", "v1", "", plain(t, "f", "1"))
	s := openStore(t, pull.Config{})
	if _, err := s.Prepare(image.Settings{Pinned: []string{"a/UPPER"}}); err == nil {
		t.Error("a faulty name is accepted")
	}
	apply, err := s.Prepare(image.Settings{registry.Sources{Dirs: []string{mirrored(t, reg, reg)}}, []string{"example.com/library/app:v1"}, trust.Config{}})
	testutil.Must(t, err)
	apply()
	if img := mustPull(t, s, "example.com/library/app:v1"); !img.Pinned {
		t.Error("the image is not pinned")
	}
	apply, err = s.Prepare(image.Settings{})
	testutil.Must(t, err)
	apply()
	if img, err := s.Get("example.com/library/app:v1"); err != nil || img.Pinned {
		t.Errorf("after the second change: %+v, %v", img, err)
	}
}
