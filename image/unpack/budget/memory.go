package budget

import (
	"cmp"
	"context"
	"fmt"
	"sync"

	"berth/image/erofs"
	"berth/image/unpack"
)

// leastMemory is the memory in bytes that each unpack process may always keep for its layer. A tree
// of 4,500 files needs no more.
const leastMemory = 2 << 20

// usualWindow is the zstd window that each process may use in addition. Encoders use up to 8 MiB by
// default.
const usualWindow = 8 << 20

// memory limits the memory of all unpack processes together: trees of packed layers, names of
// directories and zstd windows beyond usualWindow.
//
// How much memory a layer needs is known only while it is read. So each process immediately gets
// the reserved minimum and half of the free rest. If a layer needs more, its process ends and
// starts again when the maximum per layer is free. Such layers wait in a queue and hold only the
// minimum, so each gets its memory eventually. Small layers continue meanwhile.
type memory struct {
	least int64         // least memory per process, in bytes of a tree
	most  int64         // most memory per process, in bytes of a tree
	rest  int64         // total beyond the minimum of each process
	line  chan struct{} // holds one token: its holder is first in the queue

	mu sync.Mutex
	// +checklocks:mu
	free int64 // of the rest
	// +checklocks:mu
	waiting bool // a layer waits: new processes get the minimum
	// +checklocks:mu
	freed chan struct{} // closed when memory is released
}

// newMemory divides all bytes among a number of processes. If all is 0, it returns nil, and only
// the limits of each layer apply.
func newMemory(all, merging int64, processes int) *memory {
	if all <= 0 {
		return nil
	}
	least := min(leastMemory, all/int64(2*processes))
	most := cmp.Or(merging, erofs.MaxMemory) * 5 / 4 // a larger tree cannot be merged; while packing, replaced nodes count as well
	rest := all - least*int64(processes)
	return &memory{least: least, most: min(max(least, most), least+rest), rest: rest, line: make(chan struct{}, 1),
		free: rest, freed: make(chan struct{})}
}

// share returns the limits with the share of one process, without waiting. The caller releases it.
func (m *memory) share(limits unpack.Limits) (_ unpack.Limits, release func()) {
	if m == nil {
		return limits, func() {}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	more := max(0, min(m.free/2, min(m.most, limits.Memory)-m.least))
	if m.waiting {
		more = 0
	}
	m.free -= more
	limits.Memory, limits.Window = min(m.least+more, limits.Memory), usualWindow
	return limits, func() { m.release(more) }
}

func (m *memory) release(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free += bytes
	close(m.freed)
	m.freed = make(chan struct{})
}

// wait waits for the maximum of each missing resource. The caller releases it.
func (m *memory) wait(
	ctx context.Context, limits unpack.Limits, n Shortage,
) (_ unpack.Limits, release func(), err error) {
	forTree, window := m.least, int64(usualWindow)
	if n.memory {
		forTree = min(m.most, limits.Memory)
	}
	bytes := forTree - m.least
	if n.window {
		window += min(unpack.DefaultLimits.Window-usualWindow, m.rest-bytes)
		bytes += window - usualWindow
	}
	limits.Memory, limits.Window = forTree, window
	if err := m.take(ctx, bytes); err != nil {
		return limits, nil, fmt.Errorf("wait for unpack memory: %w", err)
	}
	return limits, func() { m.release(bytes) }, nil
}

// take waits in the queue for a part of the rest, or for all of it.
func (m *memory) take(ctx context.Context, bytes int64) error {
	select {
	case m.line <- struct{}{}:
		defer func() { <-m.line }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		freed, ok := m.try(bytes)
		if ok {
			return nil
		}
		select {
		case <-freed:
		case <-ctx.Done():
			m.leave()
			return ctx.Err()
		}
	}
}

// try takes bytes for the first in the queue. If too few are free, it returns a channel that is
// closed at the next release.
func (m *memory) try(bytes int64) (freed <-chan struct{}, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.waiting = m.free < bytes; m.waiting {
		return m.freed, false
	}
	m.free -= bytes
	return nil, true
}

// leave removes the first in the queue.
func (m *memory) leave() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiting = false
}
