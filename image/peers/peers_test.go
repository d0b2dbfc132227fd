package peers

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"berth/image/peers/peerstest"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/testutil"
)

// stock are the layers of a node in memory.
type stock struct {
	mu     sync.Mutex // guards layers
	layers map[Key][]byte
	opened atomic.Int64 // times that a layer was opened
	closed atomic.Int64 // and closed
	broken atomic.Int64 // reads at this offset and beyond fail; 0: none do
}

type memoryTar struct {
	*bytes.Reader
	stock *stock
}

var errBroken = errors.New("the disk is broken")

func (m memoryTar) ReadAt(p []byte, offset int64) (int, error) {
	if at := m.stock.broken.Load(); at > 0 && offset+int64(len(p)) > at {
		return 0, errBroken
	}
	return m.Reader.ReadAt(p, offset)
}
func (m memoryTar) Close() error { m.stock.closed.Add(1); return nil }

func (s *stock) OpenShared(_ context.Context, k Key) (Tar, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	content, ok := s.layers[k]
	if !ok {
		return nil, errdefs.NotFound("no layer %s", k.Blob)
	}
	s.opened.Add(1)
	return memoryTar{bytes.NewReader(content), s}, nil
}

func (s *stock) HasShared(k Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.layers[k] != nil
}

func (s *stock) SharedLayers() (keys []Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.layers {
		keys = append(keys, k)
	}
	return keys
}

func (s *stock) put(k Key, content []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.layers[k] = content
}

var discard = slog.New(slog.DiscardHandler)

// node is a node of a test.
type node struct {
	*Peers
	*stock
}

// newNodes starts nodes that know each other.
func newNodes(t *testing.T, count int, change func(i int, cfg *Config)) (nodes []node) {
	t.Helper()
	ca := peerstest.NewCA(t)
	addresses := peerstest.Addresses(t, count)
	for i, address := range addresses {
		s := &stock{layers: map[Key][]byte{}}
		cfg := Config{
			Listen: address, Advertise: address, Seeds: addresses, CA: ca.File, Layers: s, Stall: time.Minute, CallTimeout: time.Minute,
			Waits: &task.Waits{}, Log: testutil.Logger(t),
		}
		cfg.Cert, cfg.Key = ca.Node()
		if change != nil {
			change(i, &cfg)
		}
		p, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		p.members.refresh(t.Context())
		p.pause = time.Millisecond
		t.Cleanup(func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
		nodes = append(nodes, node{p, s})
	}
	return nodes
}

// wantHave waits until a home node knows a holder.
func wantHave(t *testing.T, nodes []node, k Key, holder string) {
	t.Helper()
	home := homes(nodes[0].members.all(), k, homeCount)[0]
	for _, n := range nodes {
		if n.cfg.Advertise != home {
			continue
		}
		for {
			n.tracker.mu.Lock()
			_, ok := n.tracker.get(k).holders[holder]
			n.tracker.mu.Unlock()
			if ok {
				return
			}
			if t.Context().Err() != nil {
				t.Fatal("the home node does not hear of the holder")
			}
			time.Sleep(time.Millisecond)
		}
	}
	t.Fatalf("no node is %s", home)
}

func content(size int) []byte { return bytes.Repeat([]byte("0123456789abcde\n"), size/16) }

// blobSize is the size that tests assume of each blob.
const blobSize = 64 << 20

// open opens a layer at a peer.
func open(t *testing.T, n node, k Key) (*Download, error) {
	t.Helper()
	search := n.Search(k, blobSize)
	if err := search.Wait(t.Context()); err != nil {
		return nil, err
	}
	return search.Open(t.Context())
}

// openAt opens a layer at a given peer.
func openAt(t *testing.T, n node, k Key, address string) (*Download, error) {
	t.Helper()
	return openWithin(t, n, k, address, 0)
}

// openWithin is openAt with a time that the request may wait.
func openWithin(t *testing.T, n node, k Key, address string, wait time.Duration) (*Download, error) {
	t.Helper()
	d := &Download{ctx: t.Context(), peers: n.Peers, key: k, address: address, size: -1}
	return d, d.request(wait)
}

// fetchAll reads a layer from a peer.
func fetchAll(t *testing.T, n node, k Key) ([]byte, error) {
	t.Helper()
	d, err := open(t, n, k)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	got, err := io.ReadAll(d)
	if err == nil && d.Size() != int64(len(got)) {
		t.Errorf("size %d of %d bytes", d.Size(), len(got))
	}
	return got, err
}

func TestFetchFromPeer(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 5, nil)
	k, want := testKey("layer"), content(3<<20)
	if _, err := fetchAll(t, nodes[1], k); !errors.Is(err, ErrNone) {
		t.Fatalf("nobody has the layer: %v", err)
	}
	nodes[1].put(k, want)
	nodes[1].Begin(k, func() int64 { return 0 })(true)
	wantHave(t, nodes, k, nodes[1].cfg.Advertise)
	for _, i := range []int{0, 2, 3, 4} {
		if got, err := fetchAll(t, nodes[i], k); err != nil || !bytes.Equal(got, want) {
			t.Errorf("node %d: %d bytes, %v", i, len(got), err)
		}
	}
}

func TestOthersWaitForTheFirst(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 4, nil)
	k, want := testKey("layer"), content(1<<20)
	if _, err := open(t, nodes[0], k); !errors.Is(err, ErrNone) {
		t.Fatal(err)
	}
	end := nodes[0].Begin(k, func() int64 { return 5 })
	var group sync.WaitGroup
	for _, n := range nodes[1:] {
		group.Go(func() {
			if got, err := fetchAll(t, n, k); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
	nodes[0].put(k, want)
	end(true)
	group.Wait()
}

func TestAnotherFetchesAfterAFailure(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 3, nil)
	k := testKey("layer")
	if _, err := open(t, nodes[0], k); !errors.Is(err, ErrNone) {
		t.Fatal(err)
	}
	end := nodes[0].Begin(k, func() int64 { return 5 })
	failed := make(chan error, 1)
	go func() { // ends with the fetch that the test waits for
		_, err := open(t, nodes[1], k)
		failed <- err
	}()
	end(false)
	if err := <-failed; !errors.Is(err, ErrNone) {
		t.Errorf("the waiting node got %v", err)
	}
}

func TestLostHolders(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 3, nil)
	k := testKey("layer")
	for _, address := range []string{nodes[0].cfg.Advertise, nodes[1].cfg.Advertise} { // they have nothing
		for _, n := range nodes {
			n.tracker.hold(k, by(address))
		}
	}
	if _, err := open(t, nodes[2], k); !errors.Is(err, ErrNone) {
		t.Errorf("got %v", err)
	}
}

func TestBrokenTransferIsResumedOnce(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	k, want := testKey("layer"), content(4<<20)
	nodes[0].put(k, want)
	nodes[0].broken.Store(2 << 20)
	for _, n := range nodes {
		n.tracker.hold(k, by(nodes[0].cfg.Advertise))
	}
	d, err := open(t, nodes[1], k)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	half := make([]byte, 1<<20)
	if _, err := io.ReadFull(d, half); err != nil {
		t.Fatal(err)
	}
	nodes[0].broken.Store(0)
	rest, err := io.ReadAll(d)
	if err != nil || !bytes.Equal(append(half, rest...), want) {
		t.Errorf("%d bytes, %v", len(half)+len(rest), err)
	}
	nodes[0].broken.Store(1 << 20)
	if got, err := fetchAll(t, nodes[1], k); err == nil {
		t.Errorf("%d bytes of a broken disk", len(got))
	}
}

func TestUploadsAreLimited(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, func(_ int, cfg *Config) { cfg.MaxUploads, cfg.SearchTimeout = 1, 10*time.Millisecond })
	k := testKey("layer")
	nodes[0].put(k, content(64<<20)) // more than the buffers of a connection
	for _, n := range nodes {
		n.tracker.hold(k, by(nodes[0].cfg.Advertise))
	}
	first, err := open(t, nodes[1], k)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if _, err := open(t, nodes[1], k); !errors.Is(err, errSlow) {
		t.Errorf("the second upload: %v", err)
	}
}

func TestDistrustedPeerIsNotAsked(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	for _, n := range nodes {
		n.tracker.hold(k, by(nodes[0].cfg.Advertise))
	}
	d, err := open(t, nodes[1], k)
	if err != nil {
		t.Fatal(err)
	}
	d.Distrust()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if _, err := open(t, nodes[1], k); !errors.Is(err, ErrNone) {
		t.Errorf("got %v", err)
	}
}

func TestOnlyPeersAreServed(t *testing.T) {
	t.Parallel()
	other := peerstest.NewCA(t)
	nodes := newNodes(t, 3, func(i int, cfg *Config) {
		if i == 2 { // its certificates are not those of the others
			cfg.CA = other.File
			cfg.Cert, cfg.Key = other.Node()
		}
	})
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	if d, err := openAt(t, nodes[2], k, nodes[0].cfg.Advertise); err == nil {
		t.Errorf("a stranger got the layer: %d bytes", d.Size())
	}
	if d, err := openAt(t, nodes[0], k, nodes[2].cfg.Advertise); err == nil {
		t.Errorf("a layer came from a stranger: %d bytes", d.Size())
	}
	if _, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise); err != nil {
		t.Errorf("a peer was refused: %v", err)
	}
}

func TestCallsThatAreRefused(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	k, from := testKey("layer"), nodes[1].cfg.Advertise
	many := make([]Key, maxAnnounced+1)
	for i := range many {
		many[i] = k
	}
	for name, c := range map[string]struct {
		path string
		body any
	}{
		"find for a stranger":         {findPath, query{Key: k, From: "192.0.2.1:80"}},
		"find without a key":          {findPath, query{From: from}},
		"announcement of a stranger":  {announcePath, announcement{From: "192.0.2.1:80", Keys: []Key{k}}},
		"announcement of no layer":    {announcePath, announcement{From: from, Keys: []Key{{}}}},
		"announcement of many layers": {announcePath, announcement{From: from, Keys: many}},
		"another type":                {findPath, []string{"x"}},
		"too long":                    {findPath, query{Key: k, From: from, Gone: []string{strings.Repeat("x", maxBody)}}},
		"another path":                {"/", query{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := nodes[1].call(t.Context(), nodes[0].cfg.Advertise, c.path, c.body, nil); err == nil {
				t.Error("it is accepted")
			}
		})
	}
}

func TestStrangersAreNotAsked(t *testing.T) {
	t.Parallel()
	var asked atomic.Bool
	nodes := newNodes(t, 1, nil)
	nodes[0].client.Transport = roundTripper(func(*http.Request) (*http.Response, error) {
		asked.Store(true)
		return nil, errBroken
	})
	k := testKey("layer")
	nodes[0].tracker.hold(k, by("192.0.2.1:80"))
	if _, err := open(t, nodes[0], k); !errors.Is(err, ErrNone) || asked.Load() {
		t.Errorf("got %v; asked %v", err, asked.Load())
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestRenewedCertificateTakesEffect(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	ask := func() error {
		nodes[1].client.CloseIdleConnections()
		d, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise)
		if err == nil {
			err = d.Close()
		}
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	cert, key := peerstest.NewCA(t).Node() // of another CA
	for from, to := range map[string]string{cert: nodes[1].cfg.Cert, key: nodes[1].cfg.Key} {
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	// The connection of the first request becomes idle some time after its end.
	testutil.Eventually(t, "the new certificate is refused", func() bool { return ask() != nil })
}
