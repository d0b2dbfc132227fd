package image_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/blobindex"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/lazy/toc/toctest"
	"berth/image/registry/registrytest"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// tableWorld is a registry with an image whose blob has a table of contents, and a store that has
// never seen it.
type tableWorld struct {
	lazyWorld
	packed *toctest.Blob

	mu     sync.Mutex // guards killed
	killed []string
}

var tableForms = map[string]func([]byte, toctest.Options) (*toctest.Blob, error){
	"eStargz": toctest.Stargz, "zstd:chunked": toctest.Chunked, "SOCI": toctest.Soci,
}

func newTableWorld(t *testing.T, form string, policy string, o toctest.Options) *tableWorld {
	t.Helper()
	w := &tableWorld{lazyWorld: lazyWorld{reg: registrytest.New(t), content: noise(3<<20, 9)}}
	var data bytes.Buffer
	tw := tar.NewWriter(&data)
	for _, f := range []struct {
		name    string
		content []byte
	}{{"file", w.content}, {"other", []byte("other")}, {"third", []byte("third")}} {
		testutil.Must(t, tw.WriteHeader(&tar.Header{Name: f.name, Mode: 0o640, Size: int64(len(f.content)),
			ModTime: time.Unix(1_700_000_000, 600_000_000), Format: tar.FormatPAX}))
		_, err := tw.Write(f.content)
		testutil.Must(t, err)
	}
	testutil.Must(t, tw.Close())
	o.ChunkSize = 256 << 10
	if form == "SOCI" {
		o.ChunkSize = blobindex.Grid - 1<<10 // a pull asks for a span first, which hold lets pass
	}
	var err error
	w.packed, err = tableForms[form](data.Bytes(), o)
	testutil.Must(t, err)
	w.layer = registrytest.Layer{Blob: w.packed.Bytes, DiffID: w.packed.DiffID, MediaType: w.packed.MediaType,
		Annotations: w.packed.Annotations}
	w.put(w.reg)
	w.reg.Before = w.before
	w.ref = w.reg.Host() + "/app:v1"
	w.cfg = lazyConfig(t, policy)
	w.s = openStore(t, w.cfg)
	w.needEngine(t)
	w.watch()
	return w
}

// put stores the image in a registry.
func (w *tableWorld) put(reg *registrytest.Server) {
	if w.packed.Ztoc != nil {
		reg.PutSOCIImage("app", "v1", []registrytest.Layer{w.layer}, [][]byte{w.packed.Ztoc})
		return
	}
	reg.PutImage("app", "v1", "", w.layer)
}

// watch notes the layers whose containers would be killed.
func (w *tableWorld) watch() {
	w.s.OnWrongFiles(func(_ digest.Digest, reason string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.killed = append(w.killed, reason)
	})
}

func (w *tableWorld) kills() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.killed
}

// checkTar compares the tar of the complete layer.
func (w *tableWorld) checkTar(t *testing.T) {
	t.Helper()
	restored, err := w.s.OpenTar(t.Context(), w.packed.DiffID)
	testutil.Must(t, err)
	defer restored.Close()
	got, err := io.ReadAll(restored.Whole(t.Context()))
	if err != nil || !bytes.Equal(got, w.packed.Tar) {
		t.Errorf("the tar has %d bytes, want %d: %v", len(got), len(w.packed.Tar), err)
	}
}

// The first pull of an image with a table of contents is lazy. When the layer is complete, it is
// the one that unpacking the blob makes, also after a restart in between.
func TestTableMakesTheFirstPullLazy(t *testing.T) {
	for form := range tableForms {
		for name, restarted := range map[string]bool{"same store": false, "restart": true} {
			t.Run(form+", "+name, func(t *testing.T) {
				w := newTableWorld(t, form, lazy.On, toctest.Options{Rewrite: restarted})
				release := w.hold()
				img := mustPull(t, w.s, w.ref)
				if w.incomplete(t) == nil {
					t.Fatalf("the layer is complete: %+v", w.s.LazyStatus(img))
				}
				status := w.s.LazyStatus(img)
				if !strings.Contains(status.Layers[0].Decision, "table of contents") || status.Layers[0].Unproven == "" {
					t.Errorf("%+v", status)
				}
				if restarted {
					w.s = restart(t, w.s, w.cfg)
					w.watch()
				}
				if mustPull(t, w.s, w.ref); w.incomplete(t) == nil {
					t.Error("another pull of the image waited for the layer")
				}
				release()
				testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
				testutil.Eventually(t, "the layer is not incomplete", func() bool { return w.incomplete(t) == nil })
				w.checkTar(t)
				w.compare(t, img)
				if got := w.kills(); len(got) > 0 {
					t.Errorf("killed: %q", got)
				}
				w.s = restart(t, w.s, w.cfg)
				w.checkTar(t)
			})
		}
	}
}

// compare compares the layer with one that was pulled whole.
func (w *tableWorld) compare(t *testing.T, img *image.Image) {
	t.Helper()
	whole := openStore(t, lazyConfig(t, lazy.Off))
	mustPull(t, whole, w.ref)
	var infos [2]layer.Info
	for i, s := range []*node{w.s, whole} {
		info, err := s.LayerStore(img.Layers).Info(img.Layers[0])
		testutil.Must(t, err)
		infos[i] = info
	}
	if infos[0] != infos[1] {
		t.Errorf("the layer is %+v, pulled whole it is %+v", infos[0], infos[1])
	}
}

// Without the policy, a table of contents is not used.
func TestTableNeedsThePolicy(t *testing.T) {
	w := newTableWorld(t, "eStargz", lazy.Off, toctest.Options{})
	mustPull(t, w.s, w.ref)
	if w.incomplete(t) != nil {
		t.Error("the layer is incomplete")
	}
}

// A table of contents that lies is found when the layer is complete. Its containers are killed, and
// the next pull is whole.
func TestTableLies(t *testing.T) {
	for name, lie := range map[string]func(*estargz.JTOC){
		"mode":    func(x *estargz.JTOC) { x.Entries[0].Mode = 0o4755 },
		"owner":   func(x *estargz.JTOC) { x.Entries[0].UID = 1000 },
		"file":    func(x *estargz.JTOC) { x.Entries = append(x.Entries, &estargz.TOCEntry{Name: "more", Type: "reg"}) },
		"no file": func(x *estargz.JTOC) { x.Entries = slices.Delete(x.Entries, len(x.Entries)-2, len(x.Entries)-1) },
		"time":    func(x *estargz.JTOC) { x.Entries[0].ModTime3339 = "2001-01-01T00:00:00Z" },
		"content": func(x *estargz.JTOC) { // one byte further, where padding follows
			e := x.Entries[len(x.Entries)-2]
			e.InnerOffset, e.ChunkDigest = 1, digest.FromString("other\x00"[1:]).String()
		},
	} {
		for form := range tableForms {
			t.Run(form+", "+name, func(t *testing.T) {
				w := newTableWorld(t, form, lazy.On, toctest.Options{Lie: lie})
				release := w.hold()
				img := mustPull(t, w.s, w.ref)
				if w.incomplete(t) == nil {
					t.Fatalf("the layer is complete: %+v", w.s.LazyStatus(img))
				}
				release()
				testutil.Eventually(t, "the image is removed", func() bool { _, err := w.s.Get(img.ID); return err != nil })
				if got := w.kills(); len(got) != 1 || !strings.Contains(got[0], "does not describe the layer") {
					t.Errorf("killed: %q", got)
				}
				again := mustPull(t, w.s, w.ref)
				if w.incomplete(t) != nil || !w.s.Complete(again.Layers) {
					t.Error("the second pull was lazy")
				}
				w.checkTar(t)
			})
		}
	}
}

// A false table of a blob that images share leaves the other tables of the blob in use: anyone can
// make one.
func TestFalseTableOfASharedBlob(t *testing.T) {
	w := newTableWorld(t, "SOCI", lazy.On, toctest.Options{Lie: func(x *estargz.JTOC) { x.Entries[0].Mode = 0o4755 }})
	release := w.hold()
	img := mustPull(t, w.s, w.ref)
	release()
	testutil.Eventually(t, "the image is removed", func() bool { _, err := w.s.Get(img.ID); return err != nil })
	genuine, err := toctest.Soci(w.packed.Tar, toctest.Options{ChunkSize: blobindex.Grid - 1<<10})
	testutil.Must(t, err)
	if !bytes.Equal(genuine.Bytes, w.packed.Bytes) {
		t.Fatal("the blobs differ")
	}
	w.reg.PutSOCIImage("genuine", "v1", []registrytest.Layer{w.layer}, [][]byte{genuine.Ztoc})
	release = w.hold()
	img = mustPull(t, w.s, w.reg.Host()+"/genuine:v1")
	if w.s.Complete(img.Layers) {
		t.Errorf("the layer was fetched whole: %+v", w.s.LazyStatus(img))
	}
	release()
	testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
	if got := w.kills(); len(got) != 1 {
		t.Errorf("killed: %q", got)
	}
}

// What only SOCI's table says is found to be false, too.
func TestZtocLies(t *testing.T) {
	for name, lie := range map[string]func(*toctest.Ztoc){
		"digest of a span": func(z *toctest.Ztoc) { z.Sums[5] = digest.FromString("other").String() },
		"place in the tar": func(z *toctest.Ztoc) { z.Points[5].Out += 512 },
		"bits":             func(z *toctest.Ztoc) { z.Points[5].Bits = 3 },
	} {
		t.Run(name, func(t *testing.T) {
			w := newTableWorld(t, "SOCI", lazy.On, toctest.Options{LieZtoc: lie})
			release := w.hold()
			img := mustPull(t, w.s, w.ref)
			for w.incomplete(t) == nil { // the pull has asked for the span with the false digest
				release()
				testutil.Must(t, w.s.Remove(t.Context(), img.ID))
				release = w.hold()
				img = mustPull(t, w.s, w.ref)
			}
			release()
			testutil.Eventually(t, "the image is removed", func() bool { _, err := w.s.Get(img.ID); return err != nil })
			if got := w.kills(); len(got) != 1 || !strings.Contains(got[0], "table of contents") {
				t.Errorf("killed: %q", got)
			}
			mustPull(t, w.s, w.ref)
			w.checkTar(t)
		})
	}
}

// SOCI's table is a blob of its own, so a registry that has it need not have the layer's blob.
func TestZtocNeedsTheBlob(t *testing.T) {
	w := newTableWorld(t, "SOCI", lazy.On, toctest.Options{})
	var ztocs atomic.Int64
	w.reg.Before = func(rw http.ResponseWriter, r *http.Request) bool {
		switch {
		case strings.HasSuffix(r.URL.Path, digest.FromBytes(w.packed.Ztoc).String()):
			ztocs.Add(1)
		case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, digest.FromBytes(w.packed.Bytes).String()):
			rw.WriteHeader(http.StatusForbidden)
			return true
		}
		return false
	}
	if _, err := w.s.Pull(t.Context(), w.ref, nil); errdefs.Code(err) != codes.PermissionDenied {
		t.Errorf("the pull returned: %v", err)
	}
	if w.incomplete(t) != nil || ztocs.Load() == 0 {
		t.Errorf("the layer is incomplete, or the table was requested %d times", ztocs.Load())
	}
}

// An image whose SOCI index cannot be used is pulled whole.
func TestUnusableSOCIIndex(t *testing.T) {
	for name, answer := range map[string]string{"absent": "", "no JSON": "{", "another type": `{"schemaVersion":2,"layers":[]}`} {
		t.Run(name, func(t *testing.T) {
			w := newTableWorld(t, "SOCI", lazy.On, toctest.Options{})
			asked := false
			w.reg.Before = func(rw http.ResponseWriter, r *http.Request) bool {
				if !strings.Contains(r.URL.Path, "/manifests/sha256:") || r.Method != http.MethodGet || asked {
					return false
				}
				if served := w.reg.Answer(r); !strings.Contains(served.Body.String(), "image-layer-digest") {
					return false
				}
				asked = true
				if answer == "" {
					rw.WriteHeader(http.StatusNotFound)
					return true
				}
				_, _ = io.WriteString(rw, answer)
				return true
			}
			img := mustPull(t, w.s, w.ref)
			if !asked || w.incomplete(t) != nil || !w.s.Complete(img.Layers) {
				t.Errorf("asked for the index: %v, %+v", asked, w.s.LazyStatus(img))
			}
			w.checkTar(t)
		})
	}
}

// Bytes of the blob that no chunk covers are verified, too. If they are wrong, the blob is fetched
// again.
func TestBytesWithoutContentAreFetchedAgain(t *testing.T) {
	for form := range tableForms {
		t.Run(form, func(t *testing.T) {
			w := newTableWorld(t, form, lazy.On, toctest.Options{})
			wrong := bytes.Clone(w.packed.Bytes)
			if w.packed.Ztoc == nil {
				wrong[len(wrong)-1]++ // of the footer
			} else {
				wrong[4]++ // of the header
			}
			var served atomic.Int64
			w.reg.Before = func(rw http.ResponseWriter, r *http.Request) bool {
				if w.before(rw, r) {
					return true
				}
				var first, last int
				n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last)
				if n < 2 || last-first < blobindex.Grid || served.Add(1) > 1 {
					return false
				}
				http.ServeContent(rw, r, "", time.Time{}, bytes.NewReader(wrong))
				return true
			}
			release := w.hold()
			img := mustPull(t, w.s, w.ref)
			release()
			testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
			w.checkTar(t)
			if n := served.Load(); n < 2 {
				t.Errorf("%d requests for content", n)
			}
		})
	}
}

// A source that does not have the blob cannot complete the layer.
func TestTableOfAnotherBlob(t *testing.T) {
	w := newTableWorld(t, "zstd:chunked", lazy.On, toctest.Options{})
	release := w.hold()
	img := mustPull(t, w.s, w.ref)
	l := w.incomplete(t)
	w.spoil()
	release()
	<-l.Done()
	if l.Err() == nil {
		t.Error("the layer is complete")
	}
	testutil.Eventually(t, "the image is removed", func() bool { _, err := w.s.Get(img.ID); return err != nil })
}

// A registry that stalls does not delay the pull of the same layer from another registry, which
// waits for the proof: the layer is then fetched from there.
func TestOtherRegistryCompletesTheLayer(t *testing.T) {
	w := newTableWorld(t, "eStargz", lazy.On, toctest.Options{})
	other := registrytest.New(t)
	other.PutImage("app", "v1", "", w.layer)
	release := w.hold()
	defer release()
	mustPull(t, w.s, w.ref)
	l := w.incomplete(t)
	if l == nil {
		t.Fatal("the layer is complete")
	}
	mustPull(t, w.s, other.Host()+"/app:v1")
	select {
	case <-l.Done():
	default:
		t.Error("the pull from another registry did not wait for the proof")
	}
	w.checkTar(t)
}

// A registry that sends a table of contents has not shown that it has the blob. If another pull
// creates the layer meanwhile, the image of this registry must not get it.
func TestTableGivesNoAccess(t *testing.T) {
	w := newTableWorld(t, "zstd:chunked", lazy.On, toctest.Options{})
	w.cfg.Lazy.Stall = time.Minute // the table is late
	w.s = restart(t, w.s, w.cfg)
	other := registrytest.New(t)
	other.PutImage("app", "v1", "", w.layer)
	asked, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	other.Before = func(rw http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, digest.FromBytes(w.packed.Bytes).String()):
			return false
		case r.Header.Get("Range") == "":
			rw.WriteHeader(http.StatusForbidden)
			return true
		}
		once.Do(func() { close(asked); <-proceed })
		return false
	}
	pulled := make(chan error, 1)
	go func() {
		_, err := w.s.Pull(t.Context(), other.Host()+"/app:v1", nil)
		pulled <- err
	}()
	<-asked
	img := mustPull(t, w.s, w.ref)
	testutil.Must(t, w.s.Lazy().Await(t.Context(), img.Layers))
	close(proceed)
	if err := <-pulled; errdefs.Code(err) != codes.PermissionDenied {
		t.Errorf("the pull from a registry without the blob returned: %v", err)
	}
	w.checkTar(t)
}
