package image

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint/record"
	"berth/image/layer"
	"berth/image/registry"
	"berth/image/trust"
	"berth/internal/rootfs"
)

// What tests of the store as a whole look into. They are in another package, because they pull.

// OwnerNames returns the present owners of layers.
func (s *Store) OwnerNames() []string {
	s.refs.mu.Lock()
	defer s.refs.mu.Unlock()
	return slices.Sorted(maps.Keys(s.refs.owners))
}

// LayerForm is a layer in one form.
type LayerForm struct {
	Kind rootfs.Kind
	Name digest.Digest
}

// LayerForms returns all layers in all forms.
func (s *Store) LayerForms() (list []LayerForm) {
	for _, f := range s.layers.list() {
		list = append(list, LayerForm{f.kind, f.name})
	}
	return list
}

// LayerNames returns the names of all layers, each once.
func (s *Store) LayerNames() (names []digest.Digest) {
	for _, f := range s.layers.list() {
		if !slices.Contains(names, f.name) {
			names = append(names, f.name)
		}
	}
	return names
}

func (s *Store) MergedChains() []form                   { return s.layers.merged() }
func (s *Store) FinishedDir() *record.Dir               { return s.finished.dir }
func (s *Store) MostFinished() *uint64                  { return &s.finished.most }
func (s *Store) PartialUsage() (files int, bytes int64) { return s.partial.Usage() }
func (s *Store) LayerBytes(name digest.Digest) uint64   { return s.layers.bytes(name) }
func (s *Store) LayerUsage() layer.Usage                { return s.layers.Usage() }
func (s *Store) Primary() *layer.Store                  { return s.layers.primary }
func (s *Store) ExpireAt(now time.Time)                 { s.expireAt(now) }
func (s *Store) Client() *registry.Client               { return s.cfg.Client }
func (s *Store) Records() *record.Dir                   { return s.records }
func (s *Store) Stale() map[string]bool                 { return s.stale }

// Evidence returns the evidence that is kept with an image, or nil.
func (s *Store) Evidence(id string) *trust.Evidence { return s.signatures.of(id) }

func (s *Store) LockWriter(ctx context.Context) (release func(), err error) { return s.lockWriter(ctx) }

func (x *Snapshot) Records() map[string]imageRecord { return x.records }
func (x *Snapshot) ByID() map[string]*Image         { return x.byID }
func (x *Snapshot) ByName() map[string]*Image       { return x.byName }

// FinishedNames returns the layers that failed pulls have left.
func (s *Store) FinishedNames() (names []digest.Digest) {
	for _, l := range s.finished.list() {
		names = append(names, l.Layer)
	}
	return names
}

// RecordName returns the name of an image's record.
func RecordName(id string) string { return recordName(id) }

// MinPrefix and RecordKind are constants of the package.
const (
	MinPrefix  = minPrefix
	RecordKind = recordKind
)

// FinishedLayer is the record of a layer that a failed pull has left.
type FinishedLayer = finishedLayer
