package image

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"github.com/opencontainers/go-digest"

	"berth/internal/task"
)

// Images that sleep are given up where the filesystem is fuller than they may keep it. kubelet, which removes images where a disk is full,
// is not told of them: a node that stays with a kernel that can't mount them would keep them for ever, and might stay under
// DiskPressure for that.

// noteFullness has attendSleepers look at the filesystem.
func (s *Store) noteFullness() {
	select {
	case s.fullness <- struct{}{}:
	default: // it is going to
	}
}

// attendSleepers gives sleepers up whenever kubelet removes an image, or asks what images take: a node whose disk is full gets no pods, and so hardly
// any pulls that would do it.
func (s *Store) attendSleepers() {
	for {
		select {
		case <-s.fullness:
		case <-s.ctx.Done():
			return
		}
		err := task.Guard(s.log, "give up", "images that sleep", func() error { return s.giveUpSleepers(s.ctx, 0) })
		if err != nil && s.ctx.Err() == nil {
			s.seldom.Warn(s.log, "images that sleep are kept, though the disk may be too full for them", "error", err)
		}
	}
}

// makeRoom gives sleepers up for a pull that wants so many bytes.
func (s *Store) makeRoom(ctx context.Context, wanted uint64) {
	if err := s.giveUpSleepers(ctx, wanted); err != nil && ctx.Err() == nil {
		s.log.Warn("images that sleep are kept, though they may be in the way of a pull", "error", err)
	}
}

// giveUpSleepers removes images that sleep, one after another, as long as the filesystem with so many more bytes on it would be fuller than they may
// keep it. What is being deleted counts as deleted. For what would not fit without all of them either, none goes: how much is wanted is what a
// manifest says, and anybody's pod may name that.
func (s *Store) giveUpSleepers(ctx context.Context, wanted uint64) error {
	if s.cfg.MaxFullAsleep == 0 || len(s.Asleep()) == 0 {
		return nil
	}
	if excess, err := s.layers.excess(s.cfg.MaxFullAsleep, wanted); err != nil || excess == 0 {
		return err
	}
	release, err := s.becomeWriter(ctx) // so one at a time does this
	if err != nil {
		return err
	}
	defer release()
	sleepers, freed := s.sleepers()
	if wanted > 0 && s.layers.made.CouldTake(wanted, freed+s.layers.deleting()) != nil {
		return nil // the pull is going to be told
	}
	for _, id := range sleepers {
		excess, err := s.layers.excess(s.cfg.MaxFullAsleep, wanted)
		if err != nil || excess == 0 || ctx.Err() != nil {
			return err
		}
		s.log.Warn("an image whose layers this kernel can't mount is removed to make room", "image", id, "tags", s.index.Load().records[id].Tags)
		if err := s.remove(id); err != nil {
			s.log.Warn("an image that sleeps could not be removed", "image", id, "error", err)
		}
	}
	return nil
}

// sleepers returns the IDs of the images that may be given up and how many bytes go with all of them: first those that have lost their tags to
// others, then the oldest. Pinned ones stay, and those whose layers a pull has, which may be making such an image anew: that
// keeps its names. So does one with which nothing would be freed.
func (s *Store) sleepers() (ids []string, freed uint64) {
	records := s.index.Load().records
	ids = slices.DeleteFunc(slices.Collect(maps.Keys(records)), func(id string) bool {
		rec := records[id]
		return !rec.asleep || rec.image(id, s.pinned).Pinned || s.refs.hasPull(rec.layers())
	})
	owners := make([]string, 0, len(ids))
	for _, id := range ids {
		owners = append(owners, imageOwner(id))
	}
	going := s.refs.only(owners)
	for f := range going {
		if info, err := s.layers.of(f.kind).Info(f.name); err == nil {
			freed += info.Bytes
		}
	}
	ids = slices.DeleteFunc(ids, func(id string) bool {
		rec := records[id]
		kind := s.layers.kindOf(rec)
		return !slices.ContainsFunc(rec.layers(), func(name digest.Digest) bool { return going[form{kind, name}] })
	})
	slices.SortFunc(ids, func(a, b string) int {
		return cmp.Or(cmp.Compare(min(len(records[a].Tags), 1), min(len(records[b].Tags), 1)), cmp.Compare(records[a].Sequence, records[b].Sequence))
	})
	return ids, freed
}
