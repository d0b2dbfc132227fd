package image_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/image/archive"
	"berth/image/blobindex"
	"berth/image/lazy"
	"berth/image/lazy/fill"
	"berth/image/lazy/toc/toctest"
	"berth/image/peers"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// ownInflater decompresses spans in this process.
type ownInflater blobindex.Compression

func (o ownInflater) Span(_ context.Context, p blobindex.Point, in []byte, out int64) ([]byte, error) {
	tar := make([]byte, out)
	if err := inflate.Span(blobindex.Compression(o), &p, in, tar, inflate.MaxWindow); err != nil {
		return nil, errdefs.New(codes.DataLoss, "%w", err)
	}
	return tar, nil
}

func (ownInflater) Close() error { return nil }

// lazyWorld is a registry with an image, and a store that has pulled and removed the image. Its
// next pull is lazy.
type lazyWorld struct {
	cfg     pull.Config
	reg     *registrytest.Server
	s       *node
	layer   registrytest.Layer
	content []byte
	ref     string

	mu    sync.Mutex // guards the fields below
	held  chan struct{}
	gone  bool
	wrong bool // ranges have other bytes
	auth  bool // a password is required
}

func newLazyWorld(t *testing.T) *lazyWorld {
	t.Helper()
	w := newLazyRegistry(t)
	w.cfg = lazyConfig(t, lazy.On)
	w.s = openStore(t, w.cfg)
	w.needEngine(t)
	w.forget(t)
	return w
}

// newLazyRegistry returns a world without a store.
func newLazyRegistry(t *testing.T) *lazyWorld {
	t.Helper()
	w := &lazyWorld{reg: registrytest.New(t), content: noise(7<<20, 9)}
	w.layer = framed(t, "file", w.content)
	w.reg.PutImage("app", "v1", "", w.layer)
	w.reg.Before = w.before
	w.ref = w.reg.Host() + "/app:v1"
	return w
}

func lazyConfig(t *testing.T, policy string) pull.Config {
	t.Helper()
	cfg := indexConfig(t)
	cfg.Lazy = lazy.Config{Policy: policy, Stall: 2 * time.Second,
		Inflate: func(kind blobindex.Compression, _ int64) (fill.Inflater, error) { return ownInflater(kind), nil }}
	return cfg
}

func (w *lazyWorld) needEngine(t *testing.T) {
	t.Helper()
	if !w.s.Lazy().Works() {
		t.Skip("NOT TESTED: the kernel cannot report reads of EROFS files")
	}
}

// forget pulls and removes the image, so that its index is there.
func (w *lazyWorld) forget(t *testing.T) {
	t.Helper()
	img := mustPull(t, w.s, w.ref)
	indexOf(t, w.s, w.layer)
	testutil.Must(t, w.s.Remove(t.Context(), img.ID))
}

// before holds back requests for more than the proofs, refuses all for the blob, or sends other
// bytes.
func (w *lazyWorld) before(rw http.ResponseWriter, r *http.Request) bool {
	w.mu.Lock()
	auth := w.auth
	w.mu.Unlock()
	if user, password, _ := r.BasicAuth(); auth && (user != "user" || password != "secret") {
		rw.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		rw.WriteHeader(http.StatusUnauthorized)
		return true
	}
	if !strings.HasSuffix(r.URL.Path, "/blobs/"+digest.FromBytes(w.layer.Blob).String()) {
		return false
	}
	w.mu.Lock()
	held := w.held
	w.mu.Unlock()
	var first, last int
	n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last)
	ranged := n == 2 && last-first >= blobindex.Grid
	if held != nil && ranged {
		select {
		case <-held:
		case <-r.Context().Done():
		}
	}
	w.mu.Lock()
	gone, wrong := w.gone, w.wrong
	w.mu.Unlock()
	switch {
	case gone:
		rw.WriteHeader(http.StatusNotFound)
	case wrong && ranged:
		http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(make([]byte, len(w.layer.Blob))))
	}
	return gone || wrong && ranged
}

// hold holds back the content of the layer until release is called.
func (w *lazyWorld) hold() (release func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	held := make(chan struct{})
	w.held = held
	return func() { close(held) }
}

func (w *lazyWorld) lose() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = true
}

func (w *lazyWorld) spoil() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrong = true
}

// check compares the tar of the complete layer.
func (w *lazyWorld) check(t *testing.T) {
	t.Helper()
	restored, err := w.s.OpenTar(t.Context(), w.layer.DiffID)
	testutil.Must(t, err)
	defer restored.Close()
	got, err := io.ReadAll(restored.Whole(t.Context()))
	if want := tarOf(t, "file", string(w.content)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the tar has %d bytes, want %d: %v", len(got), len(want), err)
	}
}

func (w *lazyWorld) incomplete(t *testing.T) *fill.Layer {
	t.Helper()
	img, err := w.s.Get(w.ref)
	if err != nil {
		return nil
	}
	return w.s.Lazy().Get(img.Layers[0])
}

// An incomplete layer is filled by the pull's registry, also after a restart. Peers do not get it.
func TestPullCreatesLayerLazily(t *testing.T) {
	for name, restarted := range map[string]bool{"same store": false, "restart": true} {
		t.Run(name, func(t *testing.T) {
			w := newLazyWorld(t)
			release := w.hold()
			img := mustPull(t, w.s, w.ref)
			if w.incomplete(t) == nil {
				t.Fatal("the layer is complete")
			}
			k := peers.Key{Registry: w.reg.Host(), Blob: digest.FromBytes(w.layer.Blob), DiffID: w.layer.DiffID}
			if _, err := w.s.OpenShared(t.Context(), k); err == nil || len(w.s.SharedLayers()) > 0 {
				t.Errorf("peers get the layer: %v", err)
			}
			status, stats := w.s.LazyStatus(img), w.s.LazyStats()
			if status == nil || !status.Layers[0].Incomplete || !strings.Contains(status.Layers[0].Decision, "index") ||
				status.Size == 0 || w.s.Fetched(img) != "0 %" || stats.Layers != 1 || stats.Missing == 0 {
				t.Errorf("status %+v, figures %+v, fetched %s", status, stats, w.s.Fetched(img))
			}
			if restarted {
				w.s = restart(t, w.s, w.cfg)
				again := w.s.LazyStatus(w.s.Snapshot().ByID()[img.ID])
				if again == nil || again.Layers[0].Decision != status.Layers[0].Decision {
					t.Errorf("after a restart: %+v, before: %+v", again, status)
				}
			}
			release()
			testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
			w.check(t)
			testutil.Eventually(t, "the layer is not incomplete", func() bool {
				return w.incomplete(t) == nil
			})
			if w.s.Fetched(img) != "" || len(w.s.SharedLayers()) != 1 {
				t.Errorf("shared %v", w.s.SharedLayers())
			}
		})
	}
}

// A node never uses the index of another one: it fetches the whole layer from the peer that has it.
func TestIndexOfPeerIsNotUsed(t *testing.T) {
	w := newLazyRegistry(t)
	w.cfg = lazyConfig(t, lazy.On)
	nodes := peerNodesOf(t, 2, func(i int) pull.Config { return []pull.Config{indexConfig(t), w.cfg}[i] }, nil)
	w.s = nodes[1]
	w.needEngine(t)
	mustPull(t, nodes[0], w.ref)
	indexOf(t, nodes[0], w.layer)
	l := []registrytest.Layer{w.layer}
	before := blobRequests(w.reg, l)
	mustPull(t, w.s, w.ref)
	if w.incomplete(t) != nil {
		t.Error("the layer is incomplete")
	}
	if n := blobRequests(w.reg, l) - before; n > 0 {
		t.Errorf("%d requests for the blob at the registry: the layer does not come from the peer", n)
	}
	w.check(t)
}

// An incomplete layer that is not proven and that a daemon does not load any more costs its
// containers and images. Layers with indexes of other nodes, which earlier versions of berth left,
// are among them. The next start kills the containers again, in case the daemon ended before. When
// the image was pulled again, its containers are not killed.
func TestUnprovenLayerIsNotUsed(t *testing.T) {
	table := func(t *testing.T) *lazyWorld {
		return &newTableWorld(t, "eStargz", lazy.On, toctest.Options{}).lazyWorld
	}
	for name, test := range map[string]struct {
		world func(t *testing.T) *lazyWorld
		spoil func(dir string) error
	}{
		"damaged index": {table, func(dir string) error { return os.Truncate(filepath.Join(dir, "index"), 3) }},
		"damaged TOC":   {table, func(dir string) error { return os.Truncate(filepath.Join(dir, "claim"), 3) }},
		"index of another node": {newLazyWorld, func(dir string) error {
			claim := []byte(`{"peer":"192.0.2.1:80","registry":"r.test","profile":[1]}`)
			return os.WriteFile(filepath.Join(dir, "claim"), claim, 0o600)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := test.world(t)
			release := w.hold()
			img := mustPull(t, w.s, w.ref)
			layer := img.Layers[0]
			if w.incomplete(t) == nil {
				t.Fatal("the layer is complete")
			}
			_, err := w.s.Hold("container", img.Layers)
			testutil.Must(t, err)
			testutil.Must(t, w.s.Close())
			release()
			testutil.Must(t, test.spoil(filepath.Join(w.cfg.Root, "erofs", "lazy", layer.Encoded())))
			for range 2 {
				w.s = openUnsettled(t, w.cfg, io.Discard)
				var killed []digest.Digest
				w.s.OnWrongFiles(func(layer digest.Digest, reason string) {
					killed = append(killed, layer)
					if !strings.Contains(reason, "may have been wrong") {
						t.Error(reason)
					}
				})
				if !slices.Equal(killed, []digest.Digest{layer}) {
					t.Errorf("killed %v", killed)
				}
				if _, err := w.s.Get(img.ID); err == nil {
					t.Error("the image exists")
				}
				testutil.Must(t, w.s.Close())
			}
			w.s = openUnsettled(t, w.cfg, io.Discard)
			mustPull(t, w.s, w.ref)
			testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
			testutil.Must(t, w.s.Close())
			w.s = openUnsettled(t, w.cfg, io.Discard)
			w.s.OnWrongFiles(func(layer digest.Digest, _ string) { t.Errorf("killed %s after the image was pulled again", layer) })
		})
	}
}

// An image is pulled whole if its registry is fast enough, which an earlier pull has shown.
func TestFastRegistryServesWholeImages(t *testing.T) {
	w := newLazyWorld(t)
	w.cfg.Lazy.MinTime = time.Hour
	w.s = restart(t, w.s, w.cfg)
	w.reg.PutImage("other", "v1", "", framed(t, "file", noise(7<<20, 10)))
	mustPull(t, w.s, w.reg.Host()+"/other:v1")
	img := mustPull(t, w.s, w.ref)
	if status := w.s.LazyStatus(img); status == nil || !strings.Contains(status.Layers[0].Decision, "lazy.min_time") ||
		w.incomplete(t) != nil {
		t.Errorf("%+v", status)
	}
}

// A registry that has not served the blob before serves it whole, although this node has an index
// of it.
func TestIndexOfAnotherRegistry(t *testing.T) {
	w := newLazyWorld(t)
	other := registrytest.New(t)
	other.PutImage("app", "v1", "", w.layer)
	ref := other.Host() + "/app:v1"
	img := mustPull(t, w.s, ref)
	if w.s.Lazy().Get(img.Layers[0]) != nil {
		t.Error("the first pull was lazy")
	}
	testutil.Must(t, w.s.Remove(t.Context(), img.ID))
	release := w.hold()
	defer release()
	w.s = restart(t, w.s, w.cfg)
	img = mustPull(t, w.s, ref)
	if status := w.s.LazyStatus(img); status == nil || !strings.Contains(status.Layers[0].Decision, "after the pull") {
		t.Errorf("the second pull: %+v", status)
	}
}

// A registry that does not have the blob shows nothing of it, whatever it answers to HEAD requests.
func TestRegistryMustHaveTheBlob(t *testing.T) {
	w := newLazyWorld(t)
	liar := registrytest.New(t)
	liar.PutImage("app", "v1", "", w.layer)
	path := "/blobs/" + digest.FromBytes(w.layer.Blob).String()
	wrong := bytes.Repeat([]byte("x"), len(w.layer.Blob))
	liar.Before = func(rw http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, path) || r.Method == http.MethodHead {
			return false
		}
		http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(wrong))
		return true
	}
	if _, err := w.s.Pull(t.Context(), liar.Host()+"/app:v1", nil); err == nil {
		t.Error("the pull succeeded")
	}
	if entries, err := os.ReadDir(filepath.Join(w.cfg.Root, "erofs", "lazy")); err != nil || len(entries) > 0 {
		t.Errorf("incomplete layers %v: %v", entries, err)
	}
	mustPull(t, w.s, w.ref)
}

// A layer whose index is wrong costs its index and its image. The next pull fetches it whole.
func TestWrongIndexIsQuarantined(t *testing.T) {
	w := newLazyWorld(t)
	x := indexOf(t, w.s, w.layer)
	testutil.Must(t, w.s.Lazy().IndexStore().Remove(x.Blob))
	x.Points[1].Out += 512 // of a frame
	tree, record := filepath.Join(w.cfg.Root, "tmp", "tree"), filepath.Join(w.cfg.Root, "tmp", "record")
	testutil.Must(t, os.WriteFile(tree, x.Tree, 0o600))
	testutil.Must(t, os.WriteFile(record, x.Record, 0o600))
	testutil.Must(t, w.s.Lazy().IndexStore().Add(x, tree, record))
	testutil.Must(t, w.s.Lazy().IndexStore().NoteServed(x.Blob, w.reg.Host()))
	img := mustPull(t, w.s, w.ref)
	// The layer may fail before its image is recorded. Then the same pull fetches it whole, and
	// makes an index.
	testutil.Eventually(t, "the wrong index and its layer are gone", func() bool {
		now, err := w.s.Lazy().IndexStore().Get(x.Blob)
		_, missing := w.s.Get(img.ID)
		return (err != nil || now.Points[1].Out != x.Points[1].Out) && (missing != nil || w.incomplete(t) == nil)
	})
	mustPull(t, w.s, w.ref)
	if w.incomplete(t) != nil {
		t.Error("the second pull was lazy")
	}
	w.check(t)
}

// A container holds a layer that cannot be completed. A pull makes another one beside it.
func TestFailedLayerIsRetired(t *testing.T) {
	w := newLazyWorld(t)
	release := w.hold()
	img := mustPull(t, w.s, w.ref)
	_, err := w.s.Hold("container", img.Layers)
	testutil.Must(t, err)
	l := w.incomplete(t)
	w.spoil()
	release()
	<-l.Done()
	if l.Err() == nil {
		t.Fatal("the layer is complete")
	}
	testutil.Eventually(t, "the image is removed", func() bool { _, err := w.s.Get(img.ID); return err != nil })
	again := mustPull(t, w.s, w.ref)
	if w.incomplete(t) != nil || w.s.Complete(again.Layers) {
		t.Error("the layer was not replaced, or the container would count as one on complete layers")
	}
	w.check(t)
	testutil.Must(t, w.s.Release("container"))
}

// Archives and pinned images do not depend on a registry.
func TestWholeImagesWaitForIncompleteLayers(t *testing.T) {
	w := newLazyWorld(t)
	var saved bytes.Buffer
	mustPull(t, w.s, w.ref) // lazily; Save waits
	testutil.Must(t, w.s.Save(t.Context(), &saved, image.SaveOptions{Refs: []string{w.ref}, Format: archive.OCI}))
	img, err := w.s.Get(w.ref)
	testutil.Must(t, err)
	testutil.Must(t, w.s.Remove(t.Context(), img.ID))
	if err := w.s.Lazy().Await(t.Context(), img.Layers); err != nil {
		t.Error(err)
	}
	release := w.hold()
	mustPull(t, w.s, w.ref)
	settings := w.cfg.Settings
	settings.Pinned = []string{w.ref}
	apply, err := w.s.Prepare(settings)
	testutil.Must(t, err)
	apply()
	release()
	testutil.Must(t, w.s.Remove(t.Context(), w.ref))
	mustPull(t, w.s, w.ref)
	if w.incomplete(t) != nil {
		t.Error("the pinned image is incomplete")
	}
}

// Credentials of a pull are used until the store is closed, and again from the next pull on.
func TestIncompleteLayerNeedsCredentials(t *testing.T) {
	w := newLazyWorld(t)
	release := w.hold()
	w.mu.Lock()
	w.auth = true
	w.mu.Unlock()
	auth := &runtimeapi.AuthConfig{Username: "user", Password: "secret"}
	img, err := w.s.Pull(t.Context(), w.ref, auth)
	testutil.Must(t, err)
	if w.incomplete(t) == nil {
		t.Fatal("the layer is complete")
	}
	w.s = restart(t, w.s, w.cfg)
	release()
	testutil.Eventually(t, "attempts without credentials fail", func() bool { return w.s.LazyStats().Failures > 1 })
	_, err = w.s.Pull(t.Context(), w.ref, auth)
	testutil.Must(t, err)
	testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
	w.check(t)
}

// Without its registry a layer is tried again, and waiting for it can be canceled.
func TestIncompleteLayerWithoutRegistry(t *testing.T) {
	w := newLazyWorld(t)
	release := w.hold()
	img := mustPull(t, w.s, w.ref)
	w.lose()
	release()
	ctx, cancel := context.WithCancel(t.Context())
	testutil.Eventually(t, "attempts fail", func() bool { return w.s.LazyStats().Failures > 2 })
	cancel()
	if err := w.s.Lazy().Await(ctx, img.Layers); err == nil || w.incomplete(t) == nil {
		t.Errorf("the layer is complete without its registry: %v", err)
	}
}

// After the policy is turned off, complete layers show no decision of earlier pulls any more.
func TestDecisionsEndWithThePolicy(t *testing.T) {
	w := newLazyWorld(t)
	release := w.hold()
	img := mustPull(t, w.s, w.ref)
	w.cfg.Lazy.Policy = lazy.Off
	w.s = restart(t, w.s, w.cfg)
	if status := w.s.LazyStatus(w.s.Snapshot().ByID()[img.ID]); status == nil || status.Layers[0].Decision == "" {
		t.Errorf("of an incomplete layer: %+v", status)
	}
	release()
	testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
	testutil.Eventually(t, "the layer is not incomplete", func() bool { return w.incomplete(t) == nil })
	if status := w.s.LazyStatus(w.s.Snapshot().ByID()[img.ID]); status != nil {
		t.Errorf("of a complete layer: %+v", status)
	}
}

// archive returns a directory with the registry's image.
func (w *lazyWorld) archive(t *testing.T) string {
	t.Helper()
	ref, err := name.ParseReference(w.ref, name.Insecure)
	testutil.Must(t, err)
	original, err := remote.Image(ref)
	testutil.Must(t, err)
	return layoutDir(t, "example.com/app:v1", original)
}

// An archive with the blob fills an incomplete layer, without its registry. The blob must be the
// original one: the index says where its compressed parts are.
func TestArchiveFillsIncompleteLayer(t *testing.T) {
	w := newLazyWorld(t)
	path := w.archive(t)
	release := w.hold()
	defer release()
	img := mustPull(t, w.s, w.ref)
	if w.incomplete(t) == nil {
		t.Fatal("the layer is complete")
	}
	w.lose()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.s.LoadFile(canceled, path, pull.LoadOptions{}); err == nil {
		t.Error("a load that was canceled has succeeded")
	}
	blob := filepath.Join(path, "blobs", "sha256", digest.FromBytes(w.layer.Blob).Encoded())
	for _, bad := range [][]byte{nil, w.layer.Blob[:len(w.layer.Blob)-1], make([]byte, len(w.layer.Blob))} {
		testutil.Must(t, os.WriteFile(blob, bad, 0o600))
		if _, err := w.s.LoadFile(t.Context(), path, pull.LoadOptions{}); err == nil || w.incomplete(t) == nil {
			t.Errorf("an archive with another blob of %d bytes is loaded", len(bad))
		}
	}
	testutil.Must(t, os.WriteFile(blob, w.layer.Blob, 0o600))
	loaded, err := w.s.LoadFile(t.Context(), path, pull.LoadOptions{})
	testutil.Must(t, err)
	if len(loaded) != 1 || loaded[0].ID != img.ID {
		t.Errorf("loaded %+v", loaded)
	}
	testutil.Eventually(t, "the layer is complete", func() bool { return w.incomplete(t) == nil })
	w.check(t)
}

// A pull creates a layer lazily while an archive is loaded. The loaded image does not depend on the
// pull's registry either.
func TestArchiveFillsLayerOfConcurrentPull(t *testing.T) {
	w := newLazyRegistry(t)
	w.cfg = lazyConfig(t, lazy.On)
	var before atomic.Pointer[func()]
	pack := w.cfg.Pack
	w.cfg.Pack = func(ctx context.Context, data, out *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
		if do := before.Swap(nil); do != nil {
			(*do)()
		}
		return pack(ctx, data, out, blob, job)
	}
	w.s = openStore(t, w.cfg)
	w.needEngine(t)
	w.forget(t)
	path := w.archive(t)
	release := w.hold()
	defer release()
	pullLazily := func() {
		mustPull(t, w.s, w.ref)
		if w.incomplete(t) == nil {
			t.Error("the layer is complete")
		}
		w.lose()
	}
	before.Store(&pullLazily)
	_, err := w.s.LoadFile(t.Context(), path, pull.LoadOptions{})
	testutil.Must(t, err)
	if before.Load() != nil {
		t.Fatal("no layer was unpacked")
	}
	testutil.Eventually(t, "the layer is complete", func() bool { return w.incomplete(t) == nil })
	w.check(t)
}
