package image

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/record"
	"berth/image/layer"
	"berth/image/lazy"
	blobindex "berth/image/lazy/index"
	"berth/image/peers"
	"berth/image/registry"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/task"
)

// prover returns the function that proves an index of another node. A proven index is kept for the
// next pull and for other nodes.
func (z *incompleteLayers) prover(from layer.Source, x *blobindex.Index, claim *layer.Claim) lazy.Prove {
	own := *x
	own.Tree, own.Record = nil, nil // the layer has them
	return func(ctx context.Context, tar *io.SectionReader) error {
		proven, err := z.store.prove(ctx, from, own.BlobSize, claim, tar)
		if err == nil && claim.Table == "" { // a table of contents has no states, which another node needs
			z.store.indexer.adopt(&own, proven, claim)
		}
		return err
	}
}

// prove unpacks the tar of a layer again, with a slot and memory as at a pull.
func (s *Store) prove(ctx context.Context, from layer.Source, blobSize int64, claim *layer.Claim,
	tar *io.SectionReader) (proven layer.Proven, err error) {
	l := registry.Layer{Blob: ocispec.Descriptor{Digest: from.Blob, Size: blobSize}, DiffID: from.DiffID}
	for more := (shortage{}); ; {
		var had unpack.Limits
		err = s.withSlot(ctx, claim.Registry, func() error {
			limits, release, err := s.withMemory(ctx, l, more)
			if err != nil {
				return err
			}
			defer release()
			had = limits
			if _, err := tar.Seek(0, io.SeekStart); err != nil {
				return err
			}
			proven, err = s.incomplete.layers.Prove(ctx, from.Name(), tar, limits)
			return err
		})
		if more.grow(s.memory, had, err) {
			continue
		}
		if err != nil && claim.Table != "" && rejectsContent(err) && !errdefs.IsUnwritable(err) { // of the right blob
			err = errdefs.New(codes.DataLoss, "%w", err)
		}
		return proven, err
	}
}

// adopt keeps a proven index.
func (x *indexer) adopt(index *blobindex.Index, proven layer.Proven, claim *layer.Claim) {
	err := x.store.Add(index, proven.TreePath, proven.RecordPath)
	if err == nil {
		err = errors.Join(x.store.NoteServed(index.Blob, claim.Registry), x.store.AddProfile(index.Blob, claim.Profile))
	}
	if err != nil {
		x.log.Debug("the proven index of a layer is not kept", "layer", index.Blob, "error", err)
	}
}

// distrust acts on a layer that cannot be completed and whose index came from another node. Its
// containers may have run files that are not those of the image. See suspect for the node.
func (s *Store) distrust(from layer.Source, claim *layer.Claim, reason error) {
	if claim.Table != "" {
		s.distrustTable(from, claim.Table, reason)
		return
	}
	said := "the index of another node could not be proven"
	if errors.Is(reason, lazy.ErrWrongIndex) {
		said = "another node has sent a wrong index"
	}
	s.log.Error(said+"; the containers on its layer are killed", "layer", from.DiffID, "blob", from.Blob, "peer", claim.Peer,
		"error", reason)
	s.distrusted.add(from.Name(), fmt.Sprintf("the files of the image may have been wrong: %s: node %s, layer %s: %v",
		said, claim.Peer, from.DiffID, reason))
}

// noteUnloaded notes which layers with claims a new store has not loaded: they can never be proven.
// placed and aside are those of layer.Claims before the store was opened. A layer that was set
// aside earlier counts while no other layer has its name (isThere), because an earlier daemon may
// have ended before it killed the containers.
func (z *incompleteLayers) noteUnloaded(store *layer.Store, isThere func(digest.Digest) bool,
	placed, aside map[digest.Digest]*layer.Claim) {
	z.unloaded = map[digest.Digest]*layer.Claim{}
	for name, claim := range aside {
		if !isThere(name) {
			z.unloaded[name] = claim
		}
	}
	for name, claim := range placed {
		if store.Claimed(name) == nil {
			z.unloaded[name] = claim
		}
	}
}

// distrustUnloaded is distrust for a layer that could not be loaded. Its images are set aside,
// because a layer of theirs is missing. Nobody is accused: files of this node are damaged.
func (s *Store) distrustUnloaded(name digest.Digest, claim *layer.Claim) {
	what := "the index of node " + cmp.Or(claim.Peer, "unknown")
	if claim.Table != "" {
		what = "the table of contents"
	}
	s.log.Error("a layer is damaged, so what it was made of cannot be proven; the containers on it are killed",
		"layer", name, "made_of", what)
	s.distrusted.add(name, fmt.Sprintf("the files of the image may have been wrong: %s cannot be proven, "+
		"because the layer is damaged: layer %s", what, name))
}

// OnDistrust sets the function that kills the containers on a layer whose files may be wrong. It is
// called once for each such layer, also for those found before. It must not block.
func (s *Store) OnDistrust(kill func(layer digest.Digest, reason string)) { s.distrusted.set(kill) }

const (
	// bansDir has a record for each banned peer, below the directory of the store.
	bansDir     = "bans"
	bansKind    = "banned-peer"
	bansVersion = 1
)

// ban is the record of a peer that is not asked for anything until some time.
type ban struct {
	Peer  string    `json:"peer"` // address
	Until time.Time `json:"until"`
}

// distrusted passes on layers whose files may be wrong, and keeps bans of peers over a restart.
type distrusted struct {
	dir     *record.Dir // of bans; nil: not kept
	log     *slog.Logger
	writing task.Lock // held while a record is written

	mu    sync.Mutex // guards the fields below
	kill  func(layer digest.Digest, reason string)
	early map[digest.Digest]string // found before kill was set
	bans  []ban
}

// open reads the bans of an earlier Store. Without their directory, bans end with the Store.
func (d *distrusted) open(root string, log *slog.Logger) error {
	dir, err := record.OpenDir(filepath.Join(root, bansDir), bansKind, bansVersion, record.Process)
	if err != nil {
		return err
	}
	now := time.Now()
	var over []string
	damaged, err := dir.Load(func(name string, _ int, body []byte) error {
		var b ban
		if err := json.Unmarshal(body, &b); err != nil {
			return err
		}
		if !b.Until.After(now) {
			over = append(over, name)
			return nil
		}
		if most := now.Add(peers.BanTime); b.Until.After(most) { // the clock was wrong
			b.Until = most
		}
		d.bans = append(d.bans, b)
		return nil
	})
	if err != nil {
		return err
	}
	if len(damaged) > 0 {
		log.Warn("bans of peers are forgotten: their records were damaged", "records", len(damaged))
	}
	for _, name := range over {
		if err := dir.Remove(name); err != nil {
			log.Warn("remove the record of a ban that is over; the next start tries again", "error", err)
		}
	}
	d.dir, d.log, d.writing = dir, log, task.NewLock()
	return nil
}

// ban makes this node ask a peer for nothing for some time, also after a restart. Without p, it
// does so once there is one.
func (d *distrusted) ban(p *peers.Peers, address string) {
	b := ban{address, time.Now().Add(peers.BanTime)}
	d.mu.Lock()
	d.bans = slices.DeleteFunc(d.bans, func(o ban) bool { return o.Peer == address })
	d.bans = append(d.bans, b)
	d.mu.Unlock()
	if p != nil {
		p.Ban(b.Peer, b.Until)
	}
	if d.dir == nil {
		return
	}
	d.writing <- struct{}{}
	defer func() { <-d.writing }()
	if err := d.dir.Write(digest.FromString(address).Encoded(), b); err != nil {
		d.log.Warn("a restart will forget that a peer is banned", "peer", address, "error", err)
	}
}

// use bans the peers of earlier bans.
func (d *distrusted) use(p *peers.Peers) {
	if p == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range d.bans {
		p.Ban(b.Peer, b.Until)
	}
}

func (d *distrusted) add(layer digest.Digest, reason string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.kill != nil {
		d.kill(layer, reason)
		return
	}
	if d.early == nil {
		d.early = map[digest.Digest]string{}
	}
	d.early[layer] = reason
}

func (d *distrusted) set(kill func(layer digest.Digest, reason string)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kill = kill
	for layer, reason := range d.early {
		kill(layer, reason)
	}
	d.early = nil
}

// Usable returns DataLoss if a layer cannot be completed. Containers must not start on it.
func (s *Store) Usable(layers []digest.Digest) error { return s.failedLayer(layers) }
