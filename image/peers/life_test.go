package peers

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/image/peers/peerstest"
	"berth/internal/task"
	"berth/internal/testutil"
)

// Close ends an upload that nobody reads and requests that wait, and waits for their handlers.
func TestCloseEndsRequests(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, func(_ int, cfg *Config) { cfg.MaxUploads = 1 })
	k, fetched := testKey("layer"), testKey("fetched")
	nodes[0].put(k, content(64<<20)) // more than the buffers of a connection
	d, err := openAt(t, nodes[1], k, nodes[0].cfg.Advertise)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	nodes[0].Begin(fetched, func() int64 { return 0 })
	var group sync.WaitGroup
	group.Go(func() { // waits for an upload
		_, err := openWithin(t, nodes[1], k, nodes[0].cfg.Advertise, time.Minute)
		if err == nil {
			t.Error("a second upload")
		}
	})
	group.Go(func() { // waits for a layer
		if err := nodes[1].await(t.Context(), nodes[1].Search(fetched, blobSize), nodes[0].cfg.Advertise); err == nil {
			t.Error("a layer that nobody has")
		}
	})
	testutil.Eventually(t, "both requests wait", func() bool {
		return nodes[0].waiting.Taken() == 2
	})
	if err := nodes[0].Close(); err != nil {
		t.Error(err)
	}
	if opened, closed := nodes[0].opened.Load(), nodes[0].closed.Load(); opened != 1 || closed != 1 {
		t.Errorf("%d of %d tars are closed", closed, opened)
	}
	group.Wait()
}

// A panic in the background does not end the process.
func TestPanicInTheBackground(t *testing.T) {
	t.Parallel()
	called := make(chan struct{})
	nodes := newNodes(t, 2, func(i int, cfg *Config) {
		if i == 0 {
			cfg.Layers = panicLayers{cfg.Layers, called}
		}
	})
	<-called
	nodes[0].client.Transport = roundTripper(func(*http.Request) (*http.Response, error) { panic("test") })
	nodes[0].Have(testKey("layer"))
}

type panicLayers struct {
	Layers
	called chan struct{}
}

func (l panicLayers) SharedLayers() []Key {
	close(l.called)
	panic("test")
}

// The reason of a refusal is in the error, and so in the log of the pull.
func TestRefusalHasAReason(t *testing.T) {
	t.Parallel()
	nodes := newNodes(t, 2, nil)
	err := nodes[1].call(t.Context(), nodes[0].cfg.Advertise, findPath, query{Key: testKey("layer"), From: "192.0.2.1:80"}, nil)
	if err == nil || !strings.Contains(err.Error(), "192.0.2.1:80") || !strings.Contains(err.Error(), "is not a member") {
		t.Errorf("got %v", err)
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	ca, others := peerstest.NewCA(t), peerstest.NewCA(t)
	cert, key := ca.Node()
	_, otherKey := others.Node()
	good := Config{Advertise: "10.0.0.5:4789", Cert: cert, Key: key, CA: ca.File}
	for name, c := range map[string]struct {
		change func(c *Config)
		wrong  bool
	}{
		"complete":           {func(*Config) {}, false},
		"no certificate":     {func(c *Config) { c.Cert += ".missing" }, true},
		"key of another":     {func(c *Config) { c.Key = otherKey }, true},
		"no CA":              {func(c *Config) { c.CA += ".missing" }, true},
		"CA without any":     {func(c *Config) { c.CA = key }, true},
		"name as an address": {func(c *Config) { c.Advertise = "node:4789" }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := good
			c.change(&cfg)
			if err := Check(cfg); (err != nil) != c.wrong {
				t.Errorf("got %v", err)
			}
			if !c.wrong {
				return
			}
			cfg.Listen, cfg.Log, cfg.Waits = "127.0.0.1:0", discard, &task.Waits{}
			if p, err := Open(cfg); err == nil {
				t.Error(errors.Join(errors.New("it opens"), p.Close()))
			}
		})
	}
}
