package image

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"

	"berth/image/erofs"
	"berth/image/layer"
	blobindex "berth/image/lazy/index"
	"berth/image/lazy/indexes"
	"berth/image/peers"
	"berth/image/registry"
	"berth/image/tree"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/internal/trace"
)

const (
	// askTime is the limit for questions to the registry, home nodes and holders.
	askTime = time.Second
	// transferTime is the limit for the transfer of an index. After it the layer is fetched whole.
	transferTime = 2 * time.Second
	// parallelQuestions limits the questions of one pull at a time.
	parallelQuestions = 8
)

// maxPeerIndex returns how many bytes an index of a blob may have. It is in memory, like one of
// this node. One of the usual kind has a fiftieth of the blob's size.
func maxPeerIndex(blobSize int64) int64 { return min(1<<20+blobSize/8, 48<<20) }

// maxPeerTree limits the tree of a layer: an image with a larger one is stored as directories.
const maxPeerTree = 64 << 20

// parallelIndexes limits the indexes that are fetched and decoded at a time.
const parallelIndexes = 2

// HasIndex implements peers.Layers. An index is passed on for registries that have served both the
// layer and the blob to this node. Indexes that are not proven are not in the store of indexes.
func (s *Store) HasIndex(k peers.Key) bool {
	return s.HasShared(k) && s.indexer.store.Served(k.Blob, k.Registry)
}

// OpenIndex implements peers.Layers.
func (s *Store) OpenIndex(ctx context.Context, k peers.Key) (peers.Tar, error) {
	if !s.HasIndex(k) {
		return nil, errdefs.NotFound("no index of %s for images of %s", k.Blob, k.Registry)
	}
	var w *indexes.Whole
	err := s.withIndex(ctx, k.Blob, func() (err error) { w, err = s.indexer.store.OpenWhole(k.Blob); return err })
	if err != nil {
		return nil, err
	}
	if w.DiffID != k.DiffID {
		return nil, errors.Join(errdefs.NotFound("the index of %s has another tar", k.Blob), w.Close())
	}
	return w, nil
}

// findIndexes returns the addresses of peers that have indexes of an image's missing layers, by
// the layers' names. It asks for layers that this node cannot create from an index of its own.
func (s *Store) findIndexes(ctx context.Context, store *layer.Store, img *registry.Image,
	repo *registry.Repository) map[digest.Digest]string {
	p := s.peers.Load()
	if p == nil || s.incomplete.cfg.Policy != LazyAll || s.incomplete.engine == nil || store.Kind() != rootfs.EROFS {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.incomplete.cfg.Ask)
	defer cancel()
	ctx, span := trace.Nest(ctx, "ask peers for indexes")
	defer span.End()
	var asked []registry.Layer
	found, most := map[digest.Digest]*string{}, int64(0)
	for _, l := range img.Layers {
		name := sourceOf(l).Name()
		if found[name] != nil || !mayHaveIndex(l) || store.Has(name) {
			continue
		}
		found[name] = new(string)
		most += l.Blob.Size
		if !s.indexer.store.Served(l.Blob.Digest, repo.Reference().Domain) && !s.suspects.has(l.Blob.Digest) &&
			!s.mayUseTable(l) {
			asked = append(asked, l)
		}
	}
	if most < s.incomplete.cfg.MinBytes {
		return nil
	}
	var group errgroup.Group
	group.SetLimit(parallelQuestions)
	for _, l := range asked {
		group.Go(func() error {
			return task.Guard(s.log, "ask peers for", "index of "+l.Blob.Digest.String(), func() error {
				*found[sourceOf(l).Name()] = s.findIndex(ctx, p, repo, l)
				return nil
			})
		})
	}
	_ = group.Wait() // the log has panics
	addresses := map[digest.Digest]string{}
	for name, address := range found {
		if *address != "" {
			addresses[name] = *address
		}
	}
	return addresses
}

// findIndex returns the address of a peer with the index of a layer's blob, or "". The registry
// must confirm the blob to this pull first, as for the layer itself.
func (s *Store) findIndex(ctx context.Context, p *peers.Peers, repo *registry.Repository, l registry.Layer) string {
	if !s.hasBlob(ctx, repo, l) {
		return ""
	}
	address, err := p.FindIndex(ctx, indexKey(repo, l))
	if err != nil {
		s.log.Debug("no peer has the index of a layer", "layer", l.Blob.Digest, "error", err)
	}
	return address
}

func indexKey(repo *registry.Repository, l registry.Layer) peers.Key {
	return peers.Key{Registry: repo.Reference().Domain, Blob: l.Blob.Digest, DiffID: l.DiffID}
}

// mayHaveIndex reports whether nodes make indexes of such a layer.
func mayHaveIndex(l registry.Layer) bool {
	return l.File == "" && l.Blob.Size >= minIndexed && l.Blob.Digest.Algorithm() == digest.SHA256
}

// indexOfPeer fetches the index of a layer's blob from a peer. It may be false: the layer is
// created with a claim.
func (s *Store) indexOfPeer(ctx context.Context, repo *registry.Repository, l registry.Layer,
	address string) (*blobindex.Index, *layer.Claim, error) {
	p := s.peers.Load()
	if p == nil {
		return nil, nil, errdefs.Unavailable("peers are off")
	}
	ctx, cancel := context.WithTimeout(ctx, s.incomplete.cfg.Transfer)
	defer cancel()
	ctx, span := trace.Nest(ctx, "fetch index from a peer")
	defer span.End()
	select {
	case s.peerIndexes <- struct{}{}:
		defer func() { <-s.peerIndexes }()
	case <-ctx.Done():
		return nil, nil, fmt.Errorf("wait for the indexes of other layers: %w", context.Cause(ctx))
	}
	b, err := p.FetchIndex(ctx, indexKey(repo, l), address, maxPeerIndex(l.Blob.Size))
	if err != nil {
		return nil, nil, err
	}
	x, hints, err := s.decodePeerIndex(b, l)
	if err != nil {
		if !errors.Is(err, blobindex.ErrOtherVersion) { // no honest node sends such an index
			s.distrusted.ban(p, address)
		}
		return nil, nil, fmt.Errorf("peer %s: %w", address, err)
	}
	used := layer.UsageOf(x)
	x.Summary.Bytes, x.Summary.Inodes = used.Bytes, used.Inodes
	return x, &layer.Claim{Peer: address, Registry: repo.Reference().Domain, Profile: hints}, nil
}

// decodePeerIndex decodes the index of a layer. What it says is possible, but may be false.
func (s *Store) decodePeerIndex(b []byte, l registry.Layer) (x *blobindex.Index, hints []int, err error) {
	limits := s.cfg.Limits
	x, hints, err = blobindex.DecodeWhole(b, blobindex.Bounds{Tar: limits.Tar, Data: limits.Bytes,
		Of: func(x *blobindex.Index) error { return matches(x, l) }})
	if err != nil {
		return nil, nil, err
	}
	if _, err := s.decodeTree(x.Tree, x.DataSize); err != nil {
		return nil, nil, err
	}
	return x, hints, nil
}

// decodeTree decodes the tree of a layer with dataSize bytes of data, within the limits of merges.
func (s *Store) decodeTree(encoded []byte, dataSize int64) (*tree.Node, error) {
	most := tree.Limit{Bytes: maxPeerTree, Memory: int64(cmp.Or(s.cfg.MergeMemory, erofs.MaxMemory)),
		Blocks: dataSize / tree.BlockSize}
	root, _, err := tree.Decode(bytes.NewReader(encoded), 0, most)
	if err != nil {
		return nil, fmt.Errorf("tree of the layer: %w", err)
	}
	return root, nil
}

// matches returns an error if an index is not one of a layer.
func matches(x *blobindex.Index, l registry.Layer) error {
	if x.Blob != l.Blob.Digest || x.DiffID != l.DiffID || x.BlobSize != l.Blob.Size {
		return errdefs.FailedPrecondition("the index is one of the tar %s and %d bytes, the image names %s and %d",
			x.DiffID, x.BlobSize, l.DiffID, l.Blob.Size)
	}
	return nil
}
