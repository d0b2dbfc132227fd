package image_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
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

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/layer"
	"berth/image/partial"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// bigLayers has the layers that bigLayer has made. Compressing takes seconds with the race
// detector.
var bigLayers sync.Map

// bigLayer returns a layer with a file of incompressible content. seed belongs to one name.
func bigLayer(t *testing.T, name string, seed byte) registrytest.Layer {
	t.Helper()
	if made, ok := bigLayers.Load(name); ok {
		return made.(registrytest.Layer)
	}
	content := make([]byte, 5<<20)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(content) // never fails
	data := tarOf(t, name, string(content))
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	testutil.Must(t, err)
	_, err = w.Write(data)
	testutil.Must(t, err)
	testutil.Must(t, w.Close())
	l := registrytest.Layer{Blob: b.Bytes(), MediaType: ocispec.MediaTypeImageLayerGzip, DiffID: digest.FromBytes(data)}
	bigLayers.Store(name, l)
	return l
}

// cutter is a registry handler that breaks off the transfer of one blob.
type cutter struct {
	path  string
	reg   *registrytest.Server
	limit atomic.Int64 // position after which transfers end; negative: none
	plain atomic.Bool  // range requests are answered with the whole blob
	deny  atomic.Pointer[string]
	held  chan struct{} // not nil: a transfer waits at the limit until the client leaves, after a token
	sent  atomic.Int64  // bytes of the blob
	gone  atomic.Bool   // the rest was refused: so is the whole

	mu   sync.Mutex // guards seen
	seen []string   // the Range headers
}

// cut lets a registry break off transfers of a layer's blob at a position.
func cut(reg *registrytest.Server, l registrytest.Layer, limit int) *cutter {
	c := &cutter{path: "/blobs/" + digest.FromBytes(l.Blob).String(), reg: reg}
	c.limit.Store(int64(limit))
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, c.path) {
			return false
		}
		c.mu.Lock()
		c.seen = append(c.seen, r.Header.Get("Range"))
		c.mu.Unlock()
		c.serve(w, r, l.Blob)
		return true
	}
	return c
}

func (c *cutter) serve(w http.ResponseWriter, r *http.Request, blob []byte) {
	if deny := c.deny.Load(); deny != nil && strings.Contains(r.URL.Path, *deny) {
		w.WriteHeader(http.StatusForbidden)
		return
	}
	if c.refuses(r) { // so that the pull fails without more attempts
		w.WriteHeader(http.StatusForbidden)
		return
	}
	offset, size := 0, len(blob)
	if asked := r.Header.Get("Range"); asked != "" && !c.plain.Load() {
		if _, err := fmt.Sscanf(asked, "bytes=%d-", &offset); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
	}
	w.Header().Set("Content-Length", fmt.Sprint(size-offset))
	if offset > 0 {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", offset, size-1, size))
		w.WriteHeader(http.StatusPartialContent)
	}
	end := size
	if limit := c.limit.Load(); limit >= 0 {
		end = max(min(end, int(limit)), offset)
	}
	n, _ := w.Write(blob[offset:end]) // the client may have left
	c.sent.Add(int64(n))
	if end == size {
		return
	}
	_ = http.NewResponseController(w).Flush()
	if c.held != nil {
		c.held <- struct{}{}
		<-r.Context().Done()
	}
	panic(http.ErrAbortHandler)
}

// refuses reports whether a request comes after a transfer that broke off.
func (c *cutter) refuses(r *http.Request) bool {
	var offset int64
	n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &offset)
	if limit := c.limit.Load(); n == 1 && limit >= 0 && offset >= limit {
		c.gone.Store(true)
		return true
	}
	return c.gone.Swap(false)
}

// moved returns the bytes of the blob that were sent since the last call.
func (c *cutter) moved() int64 { return c.sent.Swap(0) }

func (c *cutter) ranges() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, r := range c.seen {
		if r != "" {
			n++
		}
	}
	return n
}

func keptFiles(t *testing.T, root string) (paths []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(root, "partial", "blobs"))
	testutil.Must(t, err)
	for _, e := range entries {
		paths = append(paths, filepath.Join(root, "partial", "blobs", e.Name()))
	}
	return paths
}

func wantKept(t *testing.T, root string, n int) {
	t.Helper()
	if files := keptFiles(t, root); len(files) != n {
		t.Errorf("%d files of partial layers, want %d: %v", len(files), n, files)
	}
}

// failPull pulls an image whose transfer breaks off.
func failPull(t *testing.T, s *node, ref string) {
	t.Helper()
	if _, err := s.Pull(t.Context(), ref, nil); err == nil {
		t.Fatalf("pull of %s succeeded", ref)
	}
}

func resumeConfig(t *testing.T) pull.Config {
	return pull.Config{Root: t.TempDir(), PartialTTL: time.Hour, StallTimeout: 10 * time.Second}
}

// A pull whose connection is cut at 60 % of a layer continues there.
func TestPullResumesFailedPull(t *testing.T) {
	l := bigLayer(t, "big", 1)
	size := int64(len(l.Blob))
	for _, tc := range []struct {
		name      string
		restarted bool
		plain     bool // the registry ignores Range
		ttl       time.Duration
		most      int64 // bytes that the second pull may move
		kept      int
	}{
		{"same daemon", false, false, time.Hour, size * 45 / 100, 1},
		{"after a restart", true, false, time.Hour, size * 45 / 100, 1},
		{"registry without ranges", false, true, time.Hour, size, 1},
		{"nothing is kept", false, false, 0, size, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", l)
			c := cut(reg, l, len(l.Blob)*60/100)
			cfg := resumeConfig(t)
			cfg.PartialTTL = tc.ttl
			s := openStore(t, cfg)
			failPull(t, s, reg.Host()+"/app:v1")
			wantKept(t, cfg.Root, tc.kept)
			if tc.restarted {
				testutil.Must(t, s.Close())
				s = openStore(t, cfg)
			}
			c.moved()
			c.limit.Store(-1)
			c.plain.Store(tc.plain)
			img := mustPull(t, s, reg.Host()+"/app:v1")
			if n := c.moved(); n > tc.most || n < size*40/100 || tc.ttl == 0 && n != size {
				t.Errorf("the second pull moved %d of %d bytes, want at most %d", n, size, tc.most)
			}
			if got := readFile(t, s, img, "big"); len(got) != 5<<20 {
				t.Errorf("file has %d bytes", len(got))
			}
			wantKept(t, cfg.Root, 0)
		})
	}
}

// A registry that refuses the rest of a resumed layer says nothing about the bytes before.
func TestRefusalKeepsResumedBytes(t *testing.T) {
	l := bigLayer(t, "big", 1)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", l)
	cfg := resumeConfig(t)
	s := openStore(t, cfg)
	first := len(l.Blob) * 20 / 100
	c := cut(reg, l, first)
	failPull(t, s, reg.Host()+"/app:v1")
	for _, limit := range []int{first, 2 * first, 3 * first} {
		c.limit.Store(int64(limit))
		failPull(t, s, reg.Host()+"/app:v1")
		st, err := os.Stat(keptFile(t, cfg.Root))
		testutil.Must(t, err)
		if st.Size() != int64(limit) {
			t.Errorf("%d bytes are kept of the %d that were received", st.Size(), limit)
		}
	}
}

// A cancelled pull, and a pull that the daemon's end cancels, are resumed as well.
func TestPullResumesCancelledPull(t *testing.T) {
	for _, closed := range []bool{false, true} {
		t.Run(fmt.Sprintf("by Close %t", closed), func(t *testing.T) {
			l := bigLayer(t, "big", 1)
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", l)
			c := cut(reg, l, len(l.Blob)*60/100)
			c.held = make(chan struct{}, 1)
			cfg := resumeConfig(t)
			s := openStore(t, cfg)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			result := pullLater(ctx, s, reg.Host()+"/app:v1")
			<-c.held
			eventually(t, "the bytes are received", func() bool {
				_, bytes := s.PartialUsage()
				return bytes == c.limit.Load()
			})
			if closed {
				testutil.Must(t, s.Close())
			} else {
				cancel()
			}
			if err := <-result; err == nil {
				t.Fatal("the pull succeeded")
			}
			if closed {
				s = openStore(t, cfg)
			}
			c.moved()
			c.limit.Store(-1)
			mustPull(t, s, reg.Host()+"/app:v1")
			if n, size := c.moved(), int64(len(l.Blob)); n > size*45/100 {
				t.Errorf("the second pull moved %d of %d bytes", n, size)
			}
			wantKept(t, cfg.Root, 0)
		})
	}
}

// A killed daemon leaves a file that ends anywhere. The next pull uses it. Bytes that are wrong,
// and an unreadable file, cost a transfer but do no harm.
func TestPullWithAnyKeptBytes(t *testing.T) {
	l := bigLayer(t, "big", 1)
	size := int64(len(l.Blob))
	for _, tc := range []struct {
		name        string
		damage      func(path string) error
		least, most int64 // bytes that the second pull moves
	}{
		{"cut by a kill", func(path string) error { return os.Truncate(path, 2<<20+123) }, size - 2<<20 - 123, size - 2<<20 - 123},
		{"wrong in the middle", func(path string) error { return overwrite(path, 1<<20, "wrong") }, size, size * 2},
		{"wrong from the start", func(path string) error { return overwrite(path, 0, strings.Repeat("x", 2<<20)) }, size, size * 2},
		{"wrong and whole", func(path string) error { return overwrite(path, 0, strings.Repeat("x", len(l.Blob)+5)) }, size, size + 1},
		{"empty", func(path string) error { return os.Truncate(path, 0) }, size, size},
		{"whole", func(path string) error { return os.WriteFile(path, l.Blob, 0o600) }, 1, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", l)
			c := cut(reg, l, len(l.Blob)*60/100)
			cfg := resumeConfig(t)
			s := openStore(t, cfg)
			failPull(t, s, reg.Host()+"/app:v1")
			testutil.Must(t, s.Close())
			testutil.Must(t, tc.damage(keptFiles(t, cfg.Root)[0]))
			s = openStore(t, cfg)
			c.moved()
			c.limit.Store(-1)
			img := mustPull(t, s, reg.Host()+"/app:v1")
			if n := c.moved(); n < tc.least || n > tc.most {
				t.Errorf("the second pull moved %d bytes, want %d to %d", n, tc.least, tc.most)
			}
			if got := readFile(t, s, img, "big"); len(got) != 5<<20 {
				t.Errorf("file has %d bytes", len(got))
			}
			wantKept(t, cfg.Root, 0)
		})
	}
}

// Kept bytes that need more memory than there is are not the layer's: it is fetched as a whole.
func TestKeptBytesThatNeedMemory(t *testing.T) {
	for name, refused := range map[string]error{
		"memory":        &unpack.Error{Code: unpack.MoreMemory, Err: errors.New("little")},
		"window":        &unpack.Error{Code: unpack.MoreWindow, Err: errors.New("little")},
		"too large":     errdefs.FailedPrecondition("%w", layer.ErrTooLarge),
		"exceeds":       &unpack.Error{Code: unpack.FailedPrecondition, Err: errors.New("much")},
		"process ended": errdefs.Unavailable("berth-unpack died"),
	} {
		t.Run(name, func(t *testing.T) {
			l := bigLayer(t, "big", 1)
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", l)
			c := cut(reg, l, len(l.Blob)*60/100)
			cfg := resumeConfig(t)
			var fails atomic.Bool
			cfg.Unpack = func(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
				if fails.Swap(false) {
					_, _ = blob.Read(make([]byte, 1000)) // what comes does not matter
					return unpack.Result{}, refused
				}
				return unpack.Layer(ctx, tree, blob, job)
			}
			s := openStore(t, cfg)
			failPull(t, s, reg.Host()+"/app:v1")
			wantKept(t, cfg.Root, 1)
			c.limit.Store(-1)
			fails.Store(true)
			mustPull(t, s, reg.Host()+"/app:v1")
			if fails.Load() {
				t.Error("the kept bytes were not used")
			}
		})
	}
}

func overwrite(path string, at int64, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt([]byte(text), at)
	return err
}

// Kept bytes give access to nobody: the registry must agree to send the rest, and must be the one
// that sent the start.
func TestKeptBytesNeedAccess(t *testing.T) {
	l := bigLayer(t, "secret", 1)
	t.Run("other repository", func(t *testing.T) {
		reg := registrytest.New(t)
		reg.PutImage("victim", "v1", "", l)
		reg.PutImage("attacker", "v1", "other", l)
		reg.PutImage("reader", "v1", "third", l)
		c := cut(reg, l, len(l.Blob)*60/100)
		cfg := resumeConfig(t)
		s := openStore(t, cfg)
		failPull(t, s, reg.Host()+"/victim:v1")
		c.limit.Store(-1)
		name := "attacker"
		c.deny.Store(&name)
		_, err := s.Pull(t.Context(), reg.Host()+"/attacker:v1", nil)
		wantCode(t, err, codes.PermissionDenied)
		wantKept(t, cfg.Root, 1)
		ranges := c.ranges()
		mustPull(t, s, reg.Host()+"/reader:v1") // may have the blob, and gets it as a whole
		if n := c.ranges() - ranges; n != 0 {
			t.Errorf("%d requests for the rest of another repository's bytes", n)
		}
		wantKept(t, cfg.Root, 1)
		testutil.Must(t, s.Close())
		testutil.Must(t, os.RemoveAll(filepath.Join(cfg.Root, "records"))) // forget the reader's image
		s = openStore(t, cfg)
		c.moved()
		mustPull(t, s, reg.Host()+"/victim:v1")
		if n := c.moved(); n > int64(len(l.Blob))*45/100 {
			t.Errorf("the refused pull cost the owner his bytes: %d moved", n)
		}
	})
	// The attacker names the victim's blob with a wrong size, and with a layer that breaks the
	// pull.
	t.Run("wrong size", func(t *testing.T) {
		reg := registrytest.New(t)
		reg.PutImage("victim", "v1", "", l)
		lie := l
		lie.Size = partial.MinSize
		reg.PutImage("attacker", "v1", "other", lie)
		c := cut(reg, l, len(l.Blob)*60/100)
		cfg := resumeConfig(t)
		s := openStore(t, cfg)
		failPull(t, s, reg.Host()+"/victim:v1")
		_, before := s.PartialUsage()
		c.limit.Store(-1)
		failPull(t, s, reg.Host()+"/attacker:v1")
		if _, after := s.PartialUsage(); after != before {
			t.Errorf("the attacker has left %d of %d bytes", after, before)
		}
	})
	t.Run("other registry", func(t *testing.T) {
		victim, attacker := registrytest.New(t), registrytest.New(t)
		victim.PutImage("app", "v1", "", l)
		attacker.PutImage("app", "v1", "other", l)
		cut(victim, l, len(l.Blob)*60/100)
		c := cut(attacker, l, -1)
		s := openStore(t, resumeConfig(t))
		failPull(t, s, victim.Host()+"/app:v1")
		mustPull(t, s, attacker.Host()+"/app:v1")
		if n := c.ranges(); n != 0 {
			t.Errorf("%d requests for the rest of another registry's bytes", n)
		}
	})
}

// Finished layers of a failed pull are kept, also over a restart, and not fetched again.
func TestFinishedLayersAreKept(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	for _, restarted := range []bool{false, true} {
		t.Run(fmt.Sprintf("restarted %t", restarted), func(t *testing.T) {
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", good, bad)
			cfg := resumeConfig(t)
			s := openStore(t, cfg)
			c := keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
			if restarted {
				testutil.Must(t, s.Close())
				s = openStore(t, cfg)
			}
			if n := len(s.LayerNames()); n != 1 {
				t.Errorf("%d layers are kept", n)
			}
			c.limit.Store(-1)
			before := downloads(reg, good)
			mustPull(t, s, reg.Host()+"/app:v1")
			if n := downloads(reg, good) - before; n != 0 {
				t.Errorf("a finished layer was fetched %d times", n)
			}
			if n := len(s.FinishedNames()); n != 0 {
				t.Errorf("%d finished layers after a pull that succeeded", n)
			}
			testutil.Must(t, s.Remove(t.Context(), reg.Host()+"/app:v1"))
			if n := len(s.LayerNames()); n != 0 {
				t.Errorf("%d layers after the removal of the image", n)
			}
		})
	}
}

// What failed pulls leave is deleted when it expires, before an image is removed, when a pull lacks
// space, and at a start without partial layers.
func TestPartialLayersAreDeleted(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	for _, tc := range []struct {
		name string
		do   func(t *testing.T, s *node, cfg pull.Config, ref string) *node
	}{
		{"expired", func(t *testing.T, s *node, _ pull.Config, _ string) *node {
			s.ExpireAt(time.Now().Add(time.Hour))
			return s
		}},
		{"expired before a start", func(t *testing.T, s *node, cfg pull.Config, _ string) *node {
			testutil.Must(t, s.Close())
			past := time.Now().Add(-2 * time.Hour)
			testutil.Must(t, os.Chtimes(keptFiles(t, cfg.Root)[0], past, past))
			cfg.PartialTTL = time.Nanosecond
			return openStore(t, cfg)
		}},
		{"turned off", func(t *testing.T, s *node, cfg pull.Config, _ string) *node {
			testutil.Must(t, s.Close())
			cfg.PartialTTL = 0
			return openStore(t, cfg)
		}},
		{"another image is removed", func(t *testing.T, s *node, _ pull.Config, ref string) *node {
			testutil.Must(t, s.Remove(t.Context(), ref))
			return s
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", good, bad)
			reg.PutImage("other", "v1", "", plain(t, "a", "b"))
			cfg := resumeConfig(t)
			s := openStore(t, cfg)
			mustPull(t, s, reg.Host()+"/other:v1")
			keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
			wantKept(t, cfg.Root, 1)
			s = tc.do(t, s, cfg, reg.Host()+"/other:v1")
			wantKept(t, cfg.Root, 0)
			if n := len(s.FinishedNames()); n != 0 {
				t.Errorf("%d finished layers", n)
			}
			if n, images := len(s.LayerNames()), len(s.List()); n != images {
				t.Errorf("%d layers for %d images", n, images)
			}
		})
	}
}

// A disk without room keeps nothing, and no pull fails because of kept bytes.
func TestNoPartialLayersOnFullDisk(t *testing.T) {
	l := bigLayer(t, "big", 1)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", l)
	c := cut(reg, l, len(l.Blob)*60/100)
	cfg := resumeConfig(t)
	var free atomic.Uint64 // blocks of a byte
	free.Store(1 << 40)
	cfg.Reserve = layer.Reserve{Percent: 1, Bytes: 1, Statfs: func(string) (unix.Statfs_t, error) {
		return unix.Statfs_t{Bsize: 1, Blocks: 1 << 40, Bavail: free.Load()}, nil
	}}
	s := openStore(t, cfg)
	failPull(t, s, reg.Host()+"/app:v1")
	wantKept(t, cfg.Root, 1)
	free.Store(uint64(len(l.Blob)) - 1)
	_, err := s.Pull(t.Context(), reg.Host()+"/app:v1", nil)
	wantCode(t, err, codes.ResourceExhausted)
	wantKept(t, cfg.Root, 0) // the bytes gave way
	free.Store(uint64(len(l.Blob)) * 2)
	failPull(t, s, reg.Host()+"/app:v1")
	wantKept(t, cfg.Root, 0) // there is room for the layer only
	c.limit.Store(-1)
	mustPull(t, s, reg.Host()+"/app:v1")
}

// A manifest that claims more than the disk can have costs no kept bytes. Anyone can write one.
func TestClaimedSizeKeepsPartialLayers(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", good, bad)
	reg.PutImage("other", "v1", "", bigLayer(t, "better", 3), bigLayer(t, "worse", 4), bigLayer(t, "worst", 5))
	cfg := resumeConfig(t)
	var free atomic.Uint64 // blocks of a byte
	free.Store(1 << 40)
	cfg.Reserve = layer.Reserve{Percent: 1, Bytes: 1, Statfs: func(string) (unix.Statfs_t, error) {
		return unix.Statfs_t{Bsize: 1, Blocks: 1 << 40, Bavail: free.Load()}, nil
	}}
	s := openStore(t, cfg)
	keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
	free.Store(1 << 20)
	_, err := s.Pull(t.Context(), reg.Host()+"/other:v1", nil)
	wantCode(t, err, codes.ResourceExhausted)
	wantKept(t, cfg.Root, 1)
	if n := len(s.FinishedNames()); n != 1 {
		t.Errorf("%d finished layers", n)
	}
}

// The removal of another image leaves the finished layers of a current pull, which may still fail.
func TestRemoveKeepsLayersOfCurrentPulls(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", good, bad)
	reg.PutImage("other", "v1", "", plain(t, "a", "b"))
	s := openStore(t, resumeConfig(t))
	mustPull(t, s, reg.Host()+"/other:v1")
	c := cut(reg, bad, len(bad.Blob)*60/100)
	c.held = make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := pullLater(ctx, s, reg.Host()+"/app:v1")
	<-c.held
	eventually(t, "a layer is finished", func() bool { return len(s.FinishedNames()) == 1 })
	testutil.Must(t, s.Remove(t.Context(), reg.Host()+"/other:v1"))
	cancel()
	<-result
	if n := len(s.FinishedNames()); n != 1 {
		t.Errorf("%d finished layers", n)
	}
}

// keepGood cancels a pull of an image with a finished and an unfinished layer, and returns the
// registry's cutter.
func keepGood(t *testing.T, s *node, reg *registrytest.Server, ref string, good, bad registrytest.Layer) *cutter {
	t.Helper()
	c := cut(reg, bad, len(bad.Blob)*60/100)
	c.held = make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	before := len(s.FinishedNames())
	result := pullLater(ctx, s, ref)
	<-c.held
	eventually(t, "a layer is finished", func() bool { return len(s.FinishedNames()) == before+1 })
	eventually(t, "the other has bytes", func() bool { _, n := s.PartialUsage(); return n >= c.limit.Load() })
	cancel()
	<-result
	return c
}

// The store counts partial layers, and removes them on request.
func TestRemovePartial(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", good, bad)
	s := openStore(t, resumeConfig(t))
	c := keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
	got := s.Partial()
	stored := s.LayerBytes(s.FinishedNames()[0])
	if want := (image.Partial{Unfinished: 1, Finished: 1, Bytes: uint64(c.limit.Load()) + stored}); got != want || stored < 5<<20 {
		t.Errorf("partial layers are %+v, want %+v", got, want)
	}
	usage, err := s.Usage(t.Context())
	testutil.Must(t, err)
	if usage.Bytes < got.Bytes {
		t.Errorf("the store uses %d bytes, its partial layers %d", usage.Bytes, got.Bytes)
	}
	if removed := s.RemovePartial(); removed != got {
		t.Errorf("removed %+v, want %+v", removed, got)
	}
	if left := s.Partial(); left != (image.Partial{}) || len(s.LayerNames()) != 0 {
		t.Errorf("%+v and %d layers are left", left, len(s.LayerNames()))
	}
	wantKept(t, s.cfg.Root, 0)
}

// Finished layers have a limit. The oldest go first.
func TestFinishedLayersHaveLimit(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	better, worse := bigLayer(t, "better", 3), bigLayer(t, "worse", 4)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", good, bad)
	reg.PutImage("app", "v2", "", better, worse)
	cfg := resumeConfig(t)
	s := openStore(t, cfg)
	keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
	oldest := s.FinishedNames()[0]
	*s.MostFinished() = s.LayerBytes(oldest) * 3 / 2
	c := cut(reg, worse, len(worse.Blob)*60/100)
	c.held = make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := pullLater(ctx, s, reg.Host()+"/app:v2")
	<-c.held
	eventually(t, "another layer is finished", func() bool {
		names := s.FinishedNames()
		return len(names) == 1 && names[0] != oldest
	})
	cancel()
	<-result
	if n := len(s.LayerNames()); n != 1 {
		t.Errorf("%d layers are kept", n)
	}
}

// When a layer needs the disk's last space, partial layers give way, and the pull succeeds.
func TestPartialLayersGiveWay(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", good, bad)
	reg.PutImage("other", "v1", "", plain(t, "a", "b"))
	cfg := resumeConfig(t)
	var short atomic.Bool
	var s *node
	cfg.Reserve = layer.Reserve{Percent: 1, Bytes: 1 << 20, Statfs: func(string) (unix.Statfs_t, error) {
		free := uint64(1 << 40)
		if short.Load() && s.Partial() != (image.Partial{}) {
			free = 0
		}
		return unix.Statfs_t{Bsize: 1, Blocks: 1 << 40, Bavail: free}, nil
	}}
	s = openStore(t, cfg)
	keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
	short.Store(true)
	mustPull(t, s, reg.Host()+"/other:v1")
	if left := s.Partial(); left != (image.Partial{}) {
		t.Errorf("%+v are left", left)
	}
}

// A pull that fails because of its content takes no finished layer from another repository's pull.
func TestBadImageTakesNoFinishedLayers(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	reg := registrytest.New(t)
	reg.PutImage("victim", "v1", "", good, bad)
	broken := plain(t, "x", "y")
	broken.DiffID = digest.FromString("another")
	reg.PutImage("attacker", "v1", "other", good, broken)
	s := openStore(t, resumeConfig(t))
	keepGood(t, s, reg, reg.Host()+"/victim:v1", good, bad)
	_, err := s.Pull(t.Context(), reg.Host()+"/attacker:v1", nil)
	wantCode(t, err, codes.DataLoss)
	if n := len(s.FinishedNames()); n != 1 {
		t.Errorf("the victim has %d finished layers", n)
	}
}

// Damaged records of finished layers, and records without a layer, cost a transfer but leave
// nothing.
func TestFinishedRecordsAfterPowerCut(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	for name, damage := range map[string]func(record string) error{
		"empty":    func(record string) error { return os.Truncate(record, 0) },
		"torn":     func(record string) error { return os.Truncate(record, 20) },
		"no layer": func(record string) error { return os.RemoveAll(filepath.Join(record, "../../../layers")) },
	} {
		t.Run(name, func(t *testing.T) {
			reg := registrytest.New(t)
			reg.PutImage("app", "v1", "", good, bad)
			cfg := resumeConfig(t)
			s := openStore(t, cfg)
			c := keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
			testutil.Must(t, s.Close())
			records, err := filepath.Glob(filepath.Join(cfg.Root, "partial", "layers", "*.record"))
			if err != nil || len(records) != 1 {
				t.Fatalf("records are %v, %v", records, err)
			}
			testutil.Must(t, damage(records[0]))
			s = openStore(t, cfg)
			survey, err := image.InspectPartial(cfg.Root, cfg.PartialTTL)
			testutil.Must(t, err)
			if r := survey.Records; len(r.Damaged)+len(r.SetAside)+len(r.Other)+len(survey.Layers) != 0 {
				t.Errorf("left of the record: %+v", survey)
			}
			if n := len(s.LayerNames()); n != 0 {
				t.Errorf("%d layers without a record", n)
			}
			c.limit.Store(-1)
			img := mustPull(t, s, reg.Host()+"/app:v1")
			for _, file := range []string{"good", "bad"} {
				if got := readFile(t, s, img, file); len(got) != 5<<20 {
					t.Errorf("file %s has %d bytes", file, len(got))
				}
			}
		})
	}
}

// A record that a killed daemon has left behind, although the image was recorded, is removed.
func TestFinishedRecordOfImage(t *testing.T) {
	l := bigLayer(t, "big", 1)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", l)
	cfg := resumeConfig(t)
	s := openStore(t, cfg)
	img := mustPull(t, s, reg.Host()+"/app:v1")
	rec := image.FinishedLayer{Layer: img.Layers[0], Image: reg.Host() + "/app:v1", Time: time.Now()}
	testutil.Must(t, s.FinishedDir().Write(rec.Layer.Encoded(), rec))
	testutil.Must(t, s.Close())
	s = openStore(t, cfg)
	survey, err := image.InspectPartial(cfg.Root, cfg.PartialTTL)
	testutil.Must(t, err)
	if len(survey.Layers)+len(s.FinishedNames()) != 0 {
		t.Errorf("finished layers are %v", survey.Layers)
	}
	mustPull(t, s, reg.Host()+"/app:v1")
}

// InspectPartial finds what is not a partial layer, and what a running daemon would have deleted.
func TestInspectPartial(t *testing.T) {
	good, bad := bigLayer(t, "good", 1), bigLayer(t, "bad", 2)
	reg := registrytest.New(t)
	reg.PutImage("app", "v1", "", good, bad)
	cfg := resumeConfig(t)
	s := openStore(t, cfg)
	keepGood(t, s, reg, reg.Host()+"/app:v1", good, bad)
	survey, err := image.InspectPartial(cfg.Root, cfg.PartialTTL)
	testutil.Must(t, err)
	if len(survey.Layers) != 1 || len(survey.Unknown)+len(survey.Expired) != 0 {
		t.Errorf("found %+v", survey)
	}
	dir := filepath.Join(cfg.Root, "partial")
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "blobs", "file"), nil, 0o600))
	past := time.Now().Add(-2 * time.Hour)
	testutil.Must(t, os.Chtimes(keptFile(t, cfg.Root), past, past))
	survey, err = image.InspectPartial(cfg.Root, cfg.PartialTTL)
	testutil.Must(t, err)
	want := []string{filepath.Join(dir, "file"), filepath.Join(dir, "blobs", "file")}
	if !slices.Equal(survey.Unknown, want) || !slices.Equal(survey.Expired, []string{keptFile(t, cfg.Root)}) {
		t.Errorf("found %+v", survey)
	}
	if survey, err = image.InspectPartial(cfg.Root, 0); err != nil || len(survey.Expired) != 1 { // the record is new
		t.Errorf("found %+v, %v", survey, err)
	}
}

// keptFile returns the only file of a partial layer.
func keptFile(t *testing.T, root string) string {
	t.Helper()
	for _, path := range keptFiles(t, root) {
		if strings.Contains(path, "-") {
			return path
		}
	}
	t.Fatal("no file of a partial layer")
	return ""
}
