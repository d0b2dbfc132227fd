package image

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"github.com/opencontainers/go-digest"
)

// giveUpSleepers removes images that sleep, the oldest first, where a pull of so many bytes would make the filesystem fuller than they may
// keep it. kubelet, which removes images where a disk is full, is not told of them: a node that stays with a kernel that can't mount them would
// keep them for ever. Pinned ones stay, and the one that is pulled, the image of that chain, which will be awake.
func (s *Store) giveUpSleepers(ctx context.Context, chain []digest.Digest, wanted uint64) {
	sleepers := s.sleepers(chain)
	if s.cfg.MaxFullAsleep == 0 || len(sleepers) == 0 {
		return
	}
	excess, err := s.layers.made.Excess(s.cfg.MaxFullAsleep, wanted)
	if err != nil {
		s.log.Warn("whether there is room for images that sleep is not known", "error", err)
	}
	for freed := uint64(0); freed < excess && len(sleepers) > 0; sleepers = sleepers[1:] {
		size, err := s.removeSleeper(ctx, sleepers[0])
		if err != nil {
			s.log.Warn("an image that sleeps is kept", "image", sleepers[0], "error", err)
		}
		freed += size
	}
}

// sleepers returns the IDs of images that sleep and may be given up.
func (s *Store) sleepers(chain []digest.Digest) []string {
	records := s.index.Load().records
	mayGo := func(id string) bool {
		rec := records[id]
		return rec.asleep && !rec.image(id, s.pinned).Pinned && !slices.Equal(rec.layers(), chain)
	}
	ids := slices.DeleteFunc(slices.Collect(maps.Keys(records)), func(id string) bool { return !mayGo(id) })
	slices.SortFunc(ids, func(a, b string) int { return cmp.Compare(records[a].Sequence, records[b].Sequence) })
	return ids
}

// removeSleeper removes an image if it still sleeps, and returns its size: what of that others have too is not freed.
func (s *Store) removeSleeper(ctx context.Context, id string) (size uint64, err error) {
	release, err := s.becomeWriter(ctx)
	if err != nil {
		return 0, err
	}
	defer release()
	rec := s.index.Load().records[id]
	if !rec.asleep {
		return 0, nil // another pull has made it anew, or it was removed
	}
	s.log.Warn("an image whose layers this kernel can't mount is removed to make room", "image", id, "tags", rec.Tags)
	return rec.Size, s.remove(id)
}
