package daemon

import (
	"context"
	"log/slog"
	"time"

	"berth/cmd/config"
	"berth/image/peers"
	"berth/image/pull"
)

// peersRetry is the time between attempts to begin the exchange of layers.
const peersRetry = time.Minute

// peersConfig returns the options of the exchange of layers that are in the configuration.
func peersConfig(cfg *config.Config) peers.Config {
	return peers.Config{
		Listen: cfg.PeersListen, Advertise: cfg.PeersAdvertise, Seeds: cfg.PeersSeeds,
		Cert: cfg.PeersCert, Key: cfg.PeersKey, CA: cfg.PeersCA,
		MaxUploads: cfg.PeersUploads, Bandwidth: int64(cfg.PeersBandwidth), Stall: cfg.StallTimeout.Duration,
	}
}

// checkPeers returns an error if layers could not be exchanged because of files.
func checkPeers(cfg *config.Config) error {
	if cfg.PeersListen == "" {
		return nil
	}
	return peers.Check(peersConfig(cfg))
}

// openPeers exchanges layers with other nodes, if the configuration says so.
func (a *assembly) openPeers(images *pull.Puller) {
	if a.cfg.PeersListen == "" {
		return
	}
	cfg := peersConfig(a.cfg)
	cfg.Layers, cfg.Observer, cfg.Waits, cfg.Log = images, a.metrics, a.waits, a.log
	x := &exchange{open: func() (*peers.Peers, error) { return peers.Open(cfg) }, use: images.UsePeers, log: a.log}
	x.try()
	a.closing.Add("stop exchanging layers", whileServing(func(ctx context.Context) { x.run(ctx, peersRetry) }))
}

// exchange begins the exchange of layers and ends it. A failure, such as a missing certificate,
// must not stop the daemon. Pulls use registries until a later attempt succeeds. Only one goroutine
// may use it at a time.
type exchange struct {
	open func() (*peers.Peers, error)
	use  func(*peers.Peers)
	log  *slog.Logger

	peers *peers.Peers // nil: not open
	last  string       // the last failure
}

// try makes one attempt. It logs a failure that differs from the last one.
func (x *exchange) try() {
	p, err := x.open()
	if err != nil {
		if x.last != err.Error() {
			x.last = err.Error()
			x.log.Error("cannot exchange layers with other nodes, pulls use registries; will be tried again", "error", err)
		}
		return
	}
	x.peers = p
	x.use(p)
	x.log.Info("exchanging layers with other nodes", "address", p.Address().String())
}

// run makes further attempts, and ends the exchange when ctx ends.
func (x *exchange) run(ctx context.Context, period time.Duration) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for x.peers == nil {
		select {
		case <-tick.C:
			x.try()
		case <-ctx.Done():
			return
		}
	}
	<-ctx.Done()
	x.use(nil)
	if err := x.peers.Close(); err != nil {
		x.log.Warn("close the server for peers", "error", err)
	}
}
