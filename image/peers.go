package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/layer"
	"berth/image/peers"
	"berth/image/registry"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/trace"
)

// UsePeers makes pulls ask other nodes for layers. The caller closes p before the Store.
func (s *Store) UsePeers(p *peers.Peers) { s.peers.Store(p) }

// HasShared implements peers.Layers.
func (s *Store) HasShared(k peers.Key) bool {
	name := layer.Source{Blob: k.Blob, DiffID: k.DiffID}.Name()
	served := s.accesses.servedBy(k.Registry, name) || s.index.Load().servedBy(k.Registry, name)
	return served && s.incomplete.get(name) == nil && s.layers.has([]digest.Digest{name}) == nil
}

// OpenShared implements peers.Layers.
func (s *Store) OpenShared(ctx context.Context, k peers.Key) (peers.Tar, error) {
	if !s.HasShared(k) {
		return nil, errdefs.NotFound("no image of %s has the layer %s", k.Registry, k.Blob)
	}
	name := layer.Source{Blob: k.Blob, DiffID: k.DiffID}.Name()
	release, err := s.keepLayers(ctx, []digest.Digest{name})
	if err != nil {
		return nil, err
	}
	restored, err := s.layers.openTar(name)
	if err != nil {
		release()
		return nil, err
	}
	return &Tar{restored, release}, nil
}

// SharedLayers implements peers.Layers.
func (s *Store) SharedLayers() (keys []peers.Key) {
	seen := map[peers.Key]bool{}
	for _, rec := range s.index.Load().records {
		c, err := rec.config() // also compares the number of blobs
		if err != nil {
			continue
		}
		for _, domain := range rec.Registries {
			for i, blob := range rec.Blobs {
				from := layer.Source{Blob: blob, DiffID: c.RootFS.DiffIDs[i]}
				k := peers.Key{Registry: domain, Blob: blob, DiffID: from.DiffID}
				if !seen[k] && registry.ParseArtifact(rec.Config) == nil && s.incomplete.get(from.Name()) == nil {
					seen[k] = true
					keys = append(keys, k)
				}
			}
		}
	}
	return keys
}

// servedBy reports whether an image from a registry has a layer. Names of an image are no evidence
// of its registry: archives and operators choose them.
func (x *index) servedBy(domain string, layer digest.Digest) bool {
	for id, rec := range x.records {
		if slices.Contains(rec.Registries, domain) && slices.Contains(x.byID[id].Layers, layer) {
			return true
		}
	}
	return false
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

// errNoPeer is the error of fromPeer if the registry is to be asked.
var errNoPeer = errors.New("no peer sends the layer")

// downloadShared fetches a layer from a peer or from the registry, and tells peers that it is here.
func (s *Store) downloadShared(ctx context.Context, store *layer.Store, a *access, l registry.Layer,
	received *transfer) error {
	p := s.peers.Load()
	if p == nil || l.File != "" { // files of artifacts have no tar that could be compared
		return s.download(ctx, store, a.repo, l, received)
	}
	k := peers.Key{Registry: a.repo.Reference().Domain, Blob: l.Blob.Digest, DiffID: l.DiffID}
	err := s.fromPeer(ctx, p, store, a, l, k, received)
	if err == nil {
		a.grant(sourceOf(l).Name()) // before peers ask for it
		p.Have(k)
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if !errors.Is(err, peers.ErrNone) {
		s.log.Info("fetching layer from its registry, because peers could not send it", "layer", l.Blob.Digest,
			"error", err)
	}
	received.reset()
	have, end := false, p.Begin(k, received.at.Load)
	defer func() { end(have) }() // also after a panic
	if err := s.download(ctx, store, a.repo, l, received); err != nil {
		return err
	}
	a.grant(sourceOf(l).Name()) // before peers ask for it
	have = true
	return nil
}

// maxSources limits how many peers a pull tries for a layer before it asks the registry.
const maxSources = 3

// fromPeer stores a layer that a peer sends. The registry must confirm the blob to this pull first,
// as for a present layer (docs/adr/001-layer-access.md). If a transfer fails, fromPeer continues
// with another peer.
func (s *Store) fromPeer(ctx context.Context, p *peers.Peers, store *layer.Store, a *access, l registry.Layer,
	k peers.Key, received *transfer) error {
	ctx, span := trace.Nest(ctx, "ask peers")
	defer span.End()
	if !s.hasBlob(ctx, a.repo, l) {
		return fmt.Errorf("%w: the registry does not confirm it", errNoPeer)
	}
	search := p.Search(k, l.Blob.Size)
	var failed error
	for more, tries := (shortage{}), 0; tries < maxSources; {
		if err := search.Wait(ctx); err != nil {
			return err
		}
		had, tar, err := s.unpackShared(ctx, store, search, k.Registry, l, received, more)
		switch {
		case err == nil:
			return nil
		case more.grow(s.memory, had, err): // the peer is asked again
			continue
		case ctx.Err() != nil || !tar.isToBlame(err):
			return err
		}
		if tar.sentWrong(err) {
			tar.Distrust()
		}
		if tar != nil {
			search.Exclude(tar.Address())
		}
		s.log.Info("a peer could not send a layer", "layer", l.Blob.Digest, "error", err)
		failed = err
		tries++
	}
	return fmt.Errorf("%d peers could not send the layer: %w", maxSources, failed)
}

// unpackShared stores a layer that a peer sends. It asks for the tar after it has got a slot and
// memory, because peers have few uploads. It returns the limits of the layer, and the tar, or nil
// if no peer sends it.
func (s *Store) unpackShared(ctx context.Context, store *layer.Store, search *peers.Search, domain string,
	l registry.Layer, received *transfer, more shortage) (had unpack.Limits, from *peerTar, err error) {
	had, err = s.whenFree(ctx, domain, l, more, func(limits unpack.Limits) error {
		reading, stop := context.WithCancel(ctx)
		defer stop()
		tar, err := search.Open(reading)
		if err != nil {
			return err
		}
		from = &peerTar{Download: tar, ctx: reading, stop: stop, slow: s.slow, received: received, blobSize: l.Blob.Size}
		err = store.CreateWithPoints(ctx, sourceOf(l), from, limits, layer.Points{})
		closeErr := tar.Close()
		if err != nil {
			return fmt.Errorf("layer of peer %s: %w", tar.Address(), err)
		}
		s.log.Debug("layer received from a peer", "peer", tar.Address(), "layer", l.Blob.Digest, "bytes", tar.Size())
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
