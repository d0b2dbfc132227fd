package image

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/internal/errdefs"
)

// Tag adds a name to the image that ref names. Another image with that name loses it. Errors:
// NotFound, and InvalidArgument for a name with a digest.
func (s *Store) Tag(ctx context.Context, ref, name string) (*Image, error) {
	tag, err := parseTag(name)
	if err != nil {
		return nil, err
	}
	return s.rename(ctx, ref, func(rec imageRecord) (imageRecord, error) { return rec.with(tag, ""), nil })
}

// Untag removes a name from its image, and keeps the image. The error is NotFound if no image has
// the name.
func (s *Store) Untag(ctx context.Context, name string) (*Image, error) {
	tag, err := parseTag(name)
	if err != nil {
		return nil, err
	}
	return s.rename(ctx, tag.String(), func(rec imageRecord) (imageRecord, error) {
		if !slices.Contains(rec.Tags, tag.String()) {
			return rec, errdefs.NotFound("image %q: not found", name)
		}
		return rec.without(tag.String()), nil
	})
}

func parseTag(name string) (registry.Reference, error) {
	tag, err := registry.ParseReference(name)
	if err == nil && tag.Tag == "" {
		err = errdefs.InvalidArgument("name %q: want a tag, not a digest", name)
	}
	return tag, err
}

// rename writes the record of an image with other names.
func (s *Store) rename(ctx context.Context, ref string, change func(imageRecord) (imageRecord, error)) (*Image, error) {
	release, err := s.lockWriter(ctx)
	if err != nil {
		return nil, fmt.Errorf("tag image %s: %w", ref, err)
	}
	defer release()
	x := s.Snapshot()
	img, err := x.find(ref)
	if err != nil {
		return nil, err
	}
	rec, err := change(x.records[img.ID])
	if err != nil {
		return nil, err
	}
	records := maps.Clone(x.records)
	if err := s.put(records, img.ID, rec); err != nil {
		return nil, fmt.Errorf("tag image %s: %w", ref, err)
	}
	next := newSnapshot(records, x, s.pinned)
	s.snapshot.Store(next)
	return next.byID[img.ID], nil
}

// LayerUse describes a layer of the store.
type LayerUse struct {
	Name   digest.Digest
	DiffID digest.Digest
	Blob   digest.Digest
	Bytes  uint64 // on disk
}

// LayersOf returns the layers of an image, bottom first. Layers that another call deletes meanwhile
// are left out.
func (s *Store) LayersOf(img *Image) (list []LayerUse) {
	for _, name := range img.Layers {
		if info, err := s.layers.storeFor(Distinct(img.Layers)).Info(name); err == nil {
			list = append(list, LayerUse{Name: name, DiffID: info.DiffID, Blob: info.Blob, Bytes: info.Bytes})
		}
	}
	return list
}
