package image

import "context"

// giveUpSleepers removes the images that sleep if the filesystem is fuller than they may keep it, or would be with so many bytes more. kubelet removes
// images where a disk is full, but not what it is not told of: without this a node that stays with a kernel that can't mount them would keep them for ever.
func (s *Store) giveUpSleepers(ctx context.Context, wanted uint64) {
	ids := s.Asleep()
	if s.cfg.MaxFullAsleep == 0 || len(ids) == 0 {
		return
	}
	full, err := s.layers.made.Fullness(wanted)
	if err != nil {
		s.log.Warn("whether there is room for images that sleep is not known", "error", err)
		return
	}
	if full <= s.cfg.MaxFullAsleep {
		return
	}
	s.log.Warn("images whose layers this kernel can't mount are removed to make room", "images", ids, "full", full)
	for _, id := range ids {
		if err := s.Remove(ctx, id); err != nil {
			s.log.Warn("an image that sleeps is kept", "image", id, "error", err)
		}
	}
}
