package peers

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// A node finds the index of a layer that another one has. Others do not wait for it afterwards.
func TestFindIndex(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 3, nil)
	k := testKey("layer")
	for _, n := range nodes {
		if _, err := n.FindIndex(t.Context(), k); !errors.Is(err, ErrNone) {
			t.Errorf("without a holder: %v", err)
		}
		n.tracker.mu.Lock()
		if len(n.tracker.layers) > 0 {
			t.Error("a home node remembers who looked")
		}
		n.tracker.mu.Unlock()
	}
	nodes[0].put(k, []byte("layer"))
	nodes[0].Have(k)
	wantHave(t, nodes, k, nodes[0].cfg.Advertise)
	address, err := nodes[1].FindIndex(t.Context(), k)
	testutil.Must(t, err)
	got, err := nodes[1].FetchIndex(t.Context(), k, address, 100)
	if err != nil || string(got) != "index of layer" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := nodes[1].FetchIndex(t.Context(), k, address, 5); err == nil {
		t.Error("an index beyond the limit is accepted")
	}
	if opened, closed := nodes[0].opened.Load(), nodes[0].closed.Load(); opened == 0 || opened < closed {
		t.Errorf("opened %d, closed %d", opened, closed)
	}
	nodes[0].noIndexes.Store(true)
	if _, err := nodes[2].FindIndex(t.Context(), k); !errors.Is(err, ErrNone) {
		t.Errorf("a holder without an index: %v", err)
	}
	if _, err := nodes[1].FetchIndex(t.Context(), k, address, 100); err == nil {
		t.Error("an index that is gone is sent")
	}
}

// A banned peer is asked for no index.
func TestBannedPeerIsNotAskedForIndexes(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	k := testKey("layer")
	nodes[0].put(k, []byte("layer"))
	nodes[0].Have(k)
	nodes[1].tracker.hold(k, nodes[0].cfg.Advertise) // a home node as well
	nodes[1].Distrust(nodes[0].cfg.Advertise)
	if _, err := nodes[1].FindIndex(t.Context(), k); !errors.Is(err, ErrNone) {
		t.Error(err)
	}
}

// Indexes share the limits of uploads, and of requests that wait.
func TestIndexesTakeUploads(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, func(_ int, cfg *Config) { cfg.MaxUploads = 1 })
	k := testKey("layer")
	nodes[0].put(k, []byte("layer"))
	finish, err := nodes[0].uploads.Acquire(t.Context(), "another peer")
	testutil.Must(t, err)
	address := nodes[0].cfg.Advertise
	if _, err := nodes[1].FetchIndex(t.Context(), k, address, 100); !errors.Is(err, errBusy) {
		t.Errorf("with no free upload: %v", err)
	}
	finish()
	if _, err := nodes[1].FetchIndex(t.Context(), k, address, 100); err != nil {
		t.Error(err)
	}
}

// The wait for an index ends with its context.
func TestFetchIndexEnds(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := nodes[1].FetchIndex(ctx, testKey("layer"), nodes[0].cfg.Advertise, 100); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// FuzzIndexRequest reads the URL and the header of a request for an index.
func FuzzIndexRequest(f *testing.F) {
	f.Add(testKey("layer").path(indexPath), "bytes=5-")
	f.Add(testKey("layer").path(layerPath), "bytes=0-1,2-3")
	f.Add(indexPath+"x", "")
	f.Fuzz(func(t *testing.T, target, ranges string) {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		var err error
		if r.URL, err = r.URL.Parse("https://10.0.0.1:1/" + strings.TrimPrefix(target, "/")); err != nil {
			return
		}
		r.Header.Set("Range", ranges)
		p := fuzzPeers()
		s := &stock{layers: map[Key][]byte{}}
		p.cfg.Layers = s
		w := httptest.NewRecorder()
		p.serveIndex(w, r)
		if w.Code != http.StatusBadRequest && w.Code != http.StatusNotFound {
			t.Errorf("status %d", w.Code)
		}
	})
}
