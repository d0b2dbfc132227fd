package pull

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/peers"
	"berth/image/unpack"
	"berth/image/unpack/budget"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

// UsePeers makes pulls ask other nodes for layers. The caller closes others before the Puller.
func (p *Puller) UsePeers(others *peers.Peers) { p.peers.Store(others) }

// HasShared implements peers.Layers.
func (p *Puller) HasShared(k peers.Key) bool {
	name := layer.Source{Blob: k.Blob, DiffID: k.DiffID}.Name()
	served := p.accesses.servedBy(k.Registry, name) || p.store.Snapshot().ServedBy(k.Registry, name)
	return served && p.lazy.Get(name) == nil && p.store.HasLayer(name)
}

// OpenShared implements peers.Layers.
func (p *Puller) OpenShared(ctx context.Context, k peers.Key) (peers.Tar, error) {
	if !p.HasShared(k) {
		return nil, errdefs.NotFound("no image of %s has the layer %s", k.Registry, k.Blob)
	}
	name := layer.Source{Blob: k.Blob, DiffID: k.DiffID}.Name()
	release, err := p.store.Acquire(ctx, "tar for a peer", []digest.Digest{name})
	if err != nil {
		return nil, err
	}
	restored, err := p.store.OpenLayer(name)
	if err != nil {
		release()
		return nil, err
	}
	return image.NewTar(restored, release), nil
}

// SharedLayers implements peers.Layers.
func (p *Puller) SharedLayers() (keys []peers.Key) {
	for _, l := range p.store.Snapshot().ServedLayers() {
		if p.lazy.Get(l.Name()) == nil {
			keys = append(keys, peers.Key{Registry: l.Registry, Blob: l.Blob, DiffID: l.DiffID})
		}
	}
	return keys
}

// announce tells other nodes that this one has a layer.
func (p *Puller) announce(from layer.Source) {
	others := p.peers.Load()
	if others == nil {
		return
	}
	for _, k := range p.SharedLayers() {
		if (layer.Source{Blob: k.Blob, DiffID: k.DiffID}) == from {
			others.Have(k)
		}
	}
}

// servedBy reports whether a registry has served a layer to a current pull.
func (a *accesses) servedBy(domain string, layer digest.Digest) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for current := range a.active {
		if current.layers[layer] && current.repo.Reference().Domain == domain {
			return true
		}
	}
	return false
}

// errUnconfirmed is the error if no peer was asked, because the registry does not confirm the blob.
var errUnconfirmed = errors.New("the registry does not confirm the blob")

// maxSources limits how many peers a pull tries for a layer before it asks the registry.
const maxSources = 3

// fromPeer stores the layer that a peer sends. The registry must confirm the blob to this pull
// first, as for a present layer (docs/adr/001-layer-access.md).
func (d *download) fromPeer(at attempt) (left options, err error) {
	ctx, span := trace.Nest(d.ctx, "ask peers")
	defer span.End()
	left = options{peers: true, more: at.more}
	if d.search == nil {
		if !d.p.hasBlob(ctx, d.access.repo, d.layer) {
			return left, errUnconfirmed
		}
		d.search = d.others.Search(d.key, d.layer.Blob.Size)
	}
	if err := d.search.Wait(ctx); err != nil {
		return left, err
	}
	had, tar, err := d.unpackShared(ctx, at.more)
	var grows bool
	if left.more, grows = d.p.budget.Grow(at.more, had, err); grows || err == nil { // if it grows, the same peer is asked again
		return left, err
	}
	if ctx.Err() != nil || !tar.isToBlame(err) {
		return left, err
	}
	if tar.sentWrong(err) {
		tar.Distrust()
	}
	if tar != nil {
		d.search.Exclude(tar.Address())
	}
	return left, &peerError{err}
}

// unpackShared stores a layer that a peer sends. It asks for the tar after it has got a slot and
// memory, because peers have few uploads. It returns the limits of the layer, and the tar, or nil
// if no peer sends it.
func (d *download) unpackShared(ctx context.Context, more budget.Shortage) (had unpack.Limits, from *peerTar,
	err error) {
	l := d.layer
	had, err = d.p.budget.Run(ctx, d.key.Registry, "layer "+l.DiffID.String(), more, func(limits unpack.Limits) error {
		reading, stop := context.WithCancel(ctx)
		defer stop()
		tar, err := d.search.Open(reading)
		if err != nil {
			return err
		}
		from = &peerTar{Download: tar, ctx: reading, stop: stop, slow: d.p.slow, received: d.received, blobSize: l.Blob.Size}
		err = d.store.CreateWithPoints(ctx, lazy.SourceOf(l), from, limits, layer.Points{})
		closeErr := tar.Close()
		if err != nil {
			return fmt.Errorf("layer of peer %s: %w", tar.Address(), err)
		}
		d.p.log.Debug("layer received from a peer", "peer", tar.Address(), "layer", l.Blob.Digest, "bytes", tar.Size())
		return closeErr
	})
	return had, from, err
}

// peerTar is a tar from a peer, read at the rate of all pulls. It reports progress in bytes of the
// blob, which is what the pull shows.
type peerTar struct {
	*peers.Download
	ctx      context.Context // of the transfer
	stop     context.CancelFunc
	slow     func(ctx context.Context, n int) error
	received *transfer
	blobSize int64
	read     int64
	broken   atomic.Bool // the peer did not send all of it
}

// Read implements io.Reader.
func (t *peerTar) Read(b []byte) (int, error) {
	n, err := t.Download.Read(b)
	t.read += int64(n)
	t.received.tar.Add(int64(n))
	if size := t.Size(); size > 0 {
		at := int64(float64(t.blobSize) * float64(t.read) / float64(size))
		t.received.at.Store(at)
		t.received.shared.Store(at)
	}
	if err == nil {
		return n, t.slow(t.ctx, n)
	}
	if err != io.EOF { //nolint:errorlint // io.Reader
		t.broken.Store(true)
	}
	return n, err
}

// Stop implements unpack.Stopper. It ends a Read under way.
func (t *peerTar) Stop() { t.stop() }

// isToBlame reports whether another peer may succeed after an error. t is nil if no peer sent a
// tar.
func (t *peerTar) isToBlame(err error) bool {
	if t == nil {
		return errors.Is(err, peers.ErrFetching)
	}
	return t.broken.Load() || t.sentWrong(err)
}

// sentWrong reports whether the content of the tar caused an error. t may be nil.
func (t *peerTar) sentWrong(err error) bool {
	code := errdefs.Code(err)
	return t != nil && (code == codes.DataLoss || code == codes.InvalidArgument)
}

var _ unpack.Stopper = (*peerTar)(nil)
