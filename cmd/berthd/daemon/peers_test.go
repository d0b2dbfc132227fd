package daemon

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"berth/cmd/config"
	"berth/image/peers"
	"berth/image/peers/peerstest"
	"berth/internal/task"
	"berth/internal/testutil"
)

// noLayers has no layers.
type noLayers struct{}

func (noLayers) OpenShared(context.Context, peers.Key) (peers.Tar, error) {
	panic("no layer is shared")
}
func (noLayers) HasShared(peers.Key) bool  { return false }
func (noLayers) SharedLayers() []peers.Key { return nil }

// An exchange that cannot begin is logged once and begins later.
func TestExchangeBeginsLater(t *testing.T) {
	t.Parallel()
	ca := peerstest.NewCA(t)
	cert, key := ca.Node()
	var log testutil.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	cfg := peers.Config{Listen: "127.0.0.1:0", Advertise: "127.0.0.1:4789", Cert: cert + ".later", Key: key, CA: ca.File,
		Layers: noLayers{}, Waits: &task.Waits{}, Log: logger, Stall: time.Minute}
	var attempts atomic.Int64
	var used atomic.Pointer[peers.Peers]
	x := &exchange{open: func() (*peers.Peers, error) { attempts.Add(1); return peers.Open(cfg) }, use: used.Store, log: logger}
	x.try()
	stop := whileServing(func(ctx context.Context) { x.run(ctx, time.Millisecond) })
	testutil.Eventually(t, "further attempts", func() bool { return attempts.Load() > 3 })
	if n := strings.Count(log.String(), "level=ERROR"); n != 1 || used.Load() != nil {
		t.Errorf("%d errors are logged", n)
	}
	if err := os.Rename(cert, cfg.Cert); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "the exchange", func() bool { return used.Load() != nil })
	if err := stop(); err != nil {
		t.Error(err)
	}
	if used.Load() != nil {
		t.Error("pulls still ask peers")
	}
}

func TestCheckReadsFilesOfPeers(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	if err := Check(cfg); err != nil {
		t.Fatal(err)
	}
	ca := peerstest.NewCA(t)
	cfg.PeersListen, cfg.PeersAdvertise, cfg.PeersCA = "0.0.0.0:4789", "10.0.0.5:4789", ca.File
	cfg.PeersCert, cfg.PeersKey = ca.Node()
	if err := Check(cfg); err != nil {
		t.Error(err)
	}
	cfg.PeersCert += ".missing"
	if err := Check(cfg); err == nil || !strings.Contains(err.Error(), cfg.PeersCert) {
		t.Errorf("a missing certificate: %v", err)
	}
}
