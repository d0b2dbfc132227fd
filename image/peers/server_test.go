package peers

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/image/peers/peerstest"
	"berth/internal/fair"
)

// A request with several ranges is refused before anything of the layer is read.
func TestSeveralRangesAreRefused(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	for header, want := range map[string]int{
		"":                  http.StatusOK,
		"bytes=5-":          http.StatusPartialContent,
		"bytes=0-1,2-3":     http.StatusBadRequest,
		"bytes=0-0, -1, 5-": http.StatusBadRequest,
	} {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+nodes[0].cfg.Advertise+k.path(), nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Range", header)
		if header == "" {
			request.Header.Del("Range")
		}
		response, err := nodes[1].client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("range %q: status %d, want %d", header, response.StatusCode, want)
		}
	}
}

// A node has no route for indexes of blobs, which earlier builds sent, whatever a member asks.
func TestIndexesAreNotServed(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	path := strings.Replace(k.path(), "/layers/", "/indexes/", 1)
	for _, method := range []string{http.MethodHead, http.MethodGet, http.MethodPost} {
		request, err := http.NewRequestWithContext(t.Context(), method, "https://"+nodes[0].cfg.Advertise+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := nodes[1].client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		_ = response.Body.Close()
		if response.StatusCode != http.StatusNotFound {
			t.Errorf("%s: status %d", method, response.StatusCode)
		}
	}
	if n := nodes[0].opened.Load(); n > 0 {
		t.Errorf("%d layers were opened", n)
	}
}

// Requests that wait for an upload or a layer have a limit, and one certificate cannot use all of
// it.
func TestWaitingRequestsAreLimited(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, func(_ int, cfg *Config) { cfg.MaxWaiting = 2 })
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	for _, owner := range []string{"a", "b"} {
		release, ok := nodes[0].waiting.TryAcquire(owner)
		if !ok {
			t.Fatalf("%s cannot wait", owner)
		}
		defer release()
	}
	if _, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise); !errors.Is(err, errBusy) {
		t.Errorf("the third request: %v", err)
	}
}

// A request that waits for an upload has nothing of the layer open.
func TestLayerIsOpenedForUploadsOnly(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, func(_ int, cfg *Config) { cfg.MaxUploads = 1 })
	k := testKey("layer")
	nodes[0].put(k, content(1<<20))
	release, err := nodes[0].uploads.Acquire(t.Context(), "another peer")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise); !errors.Is(err, errBusy) {
		t.Errorf("got %v", err)
	}
	if n := nodes[0].opened.Load(); n != 0 {
		t.Errorf("the layer was opened %d times without an upload", n)
	}
	release()
	d, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

type noDeadline struct{}

func (noDeadline) SetWriteDeadline(time.Time) error { return nil }

// A receiver that takes a piece now and then does not keep an upload.
func TestSlowReceivers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		pause time.Duration // between pieces of 32 KiB
		rate  int64         // of all uploads; 0: no limit
		want  error
	}{
		"fast":                {pause: time.Millisecond},
		"just fast enough":    {pause: time.Second},
		"slow":                {pause: 10 * time.Second, want: fair.ErrStalled},
		"behind other peers":  {rate: 1 << 20},
		"small own bandwidth": {rate: leastRate / 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p := newPeers(Config{Bandwidth: c.rate, Stall: time.Minute, Log: discard}, nil)
				data := content(4 << 20)
				u := &upload{
					ctx: t.Context(), peers: p, response: noDeadline{}, from: io.NewSectionReader(bytes.NewReader(data), 0, int64(len(data))),
					meter: fair.Meter{Window: time.Minute, Rate: leastRate},
				}
				var err error
				piece := make([]byte, 32<<10)
				for err == nil {
					var n int
					if n, err = u.Read(piece); n > 0 {
						time.Sleep(c.pause)
					}
				}
				if errors.Is(err, io.EOF) {
					err = nil
				}
				if !errors.Is(err, c.want) {
					t.Errorf("got %v, want %v", err, c.want)
				}
			})
		})
	}
}

// Uploads within a bandwidth arrive.
func TestUploadBandwidth(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, func(_ int, cfg *Config) { cfg.Bandwidth = 8 << 20 })
	k, want := testKey("layer"), content(2<<20)
	nodes[0].put(k, want)
	for _, n := range nodes {
		n.tracker.hold(k, by(nodes[0].cfg.Advertise))
	}
	if got, err := fetchAll(t, nodes[1], k); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// Half of the uploads remain for other certificates.
func TestUploadsAreShared(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 3, func(_ int, cfg *Config) { cfg.MaxUploads = 2 })
	k := testKey("layer")
	nodes[0].put(k, content(64<<20)) // more than the buffers of a connection
	for _, n := range nodes[1:] {
		d, err := openAt(t, n, k, nodes[0].cfg.Advertise)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if _, err := openAt(t, n, k, nodes[0].cfg.Advertise); !errors.Is(err, errBusy) {
			t.Errorf("a second upload to the same peer: %v", err)
		}
	}
}

func TestCertificateIsReadWhenItChanges(t *testing.T) {
	t.Parallel()
	ca := peerstest.NewCA(t)
	cert, key := ca.Node()
	pair := &keyPair{files: [2]string{cert, key}}
	first, err := pair.get()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := pair.get(); err != nil || again != first {
		t.Errorf("unchanged files were parsed again: %v", err)
	}
	newCert, newKey := ca.Node()
	if err := os.Rename(newCert, cert); err != nil {
		t.Fatal(err)
	}
	if _, err := pair.get(); err == nil {
		t.Error("a certificate without its key is used")
	}
	if err := os.Rename(newKey, key); err != nil {
		t.Fatal(err)
	}
	if renewed, err := pair.get(); err != nil || bytes.Equal(renewed.Certificate[0], first.Certificate[0]) {
		t.Errorf("the new certificate is not used: %v", err)
	}
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	if _, err := pair.get(); err == nil {
		t.Error("a certificate without its key is used")
	}
}
