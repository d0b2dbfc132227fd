package image

import (
	"cmp"
	"context"
	"fmt"
	"sync"

	"berth/image/erofs"
	"berth/image/unpack"
)

// leastMemory is what each process that unpacks a layer may take for what it keeps of the layer.
// 4,500 files of a tree take so much.
const leastMemory = 2 << 20

// usualWindow is the zstd window that each process may take beside that. Encoders use up to 8 MiB
// by default.
const usualWindow = 8 << 20

// workMemory is what the processes that unpack layers may keep in memory, all together: trees of
// layers that are packed, names of directories, windows of zstd beyond usualWindow.
//
// How much a layer takes shows when it is read, so each process gets a share at once: the least,
// which is kept for as many as there can be at a time, and half of what is free of the rest. A
// process whose layer takes more ends, and begins again when there is as much as any layer may
// take. Those wait in line. Nobody waits who has more than the least, so whoever waits gets it, and
// small layers go on meanwhile.
type workMemory struct {
	least, most int64         // of a tree
	rest        int64         // beside the least of each
	line        chan struct{} // holds a token: whoever has it is the first of those who wait

	mu      sync.Mutex    // guards what follows
	free    int64         // of the rest
	waiting bool          // somebody waits: others get the least
	given   chan struct{} // closed when something is given back
}

// newWorkMemory is all of the memory, for so many processes at a time. Trees are merged with so
// much (Config.MergeMemory). 0: each may take what its layer's limits say.
func newWorkMemory(all, merging int64, processes int) *workMemory {
	if all <= 0 {
		return nil
	}
	least := min(leastMemory, all/int64(2*processes))
	most := cmp.Or(merging, erofs.MaxMemory) * 5 / 4 // what takes more can't be merged; only while it is packed what is replaced counts, too
	rest := all - least*int64(processes)
	return &workMemory{least: least, most: min(max(least, most), least+rest), rest: rest, line: make(chan struct{}, 1), free: rest, given: make(chan struct{})}
}

// share gives a process what there is for the layer, and does not wait. The caller gives it back.
func (m *workMemory) share(limits unpack.Limits) (_ unpack.Limits, giveBack func()) {
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
	return limits, func() { m.giveBack(more) }
}

func (m *workMemory) giveBack(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free += bytes
	close(m.given)
	m.given = make(chan struct{})
}

// lack is what a layer was found to need more of than its share.
type lack struct{ memory, window bool }

// grow notes what made a process fail, and reports whether the layer may get more of it than the
// limits that it had.
func (n *lack) grow(m *workMemory, had unpack.Limits, err error) bool {
	if m == nil || err == nil {
		return false
	}
	switch unpack.CodeOf(err) {
	case unpack.MoreMemory:
		if n.memory || had.Memory >= m.most {
			return false
		}
		n.memory = true
	case unpack.MoreWindow:
		if n.window {
			return false
		}
		n.window = true
	default:
		return false
	}
	return true
}

// wait waits in line for all that a layer may take of what it needs more of. The caller gives it
// back.
func (m *workMemory) wait(ctx context.Context, limits unpack.Limits, n lack) (_ unpack.Limits, giveBack func(), err error) {
	memory, window := m.least, int64(usualWindow)
	if n.memory {
		memory = min(m.most, limits.Memory)
	}
	bytes := memory - m.least
	if n.window {
		window += min(unpack.DefaultLimits.Window-usualWindow, m.rest-bytes)
		bytes += window - usualWindow
	}
	limits.Memory, limits.Window = memory, window
	if err := m.take(ctx, bytes); err != nil {
		return limits, nil, fmt.Errorf("wait for memory to unpack it with: %w", err)
	}
	return limits, func() { m.giveBack(bytes) }, nil
}

// take waits in line for bytes of the rest, which has as many when all is given back.
func (m *workMemory) take(ctx context.Context, bytes int64) error {
	select {
	case m.line <- struct{}{}:
		defer func() { <-m.line }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		given, ok := m.try(bytes)
		if ok {
			return nil
		}
		select {
		case <-given:
		case <-ctx.Done():
			m.leave()
			return ctx.Err()
		}
	}
}

// try takes bytes for the first in line, or returns a channel that is closed when it is worth
// trying again.
func (m *workMemory) try(bytes int64) (given <-chan struct{}, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.waiting = m.free < bytes; m.waiting {
		return m.given, false
	}
	m.free -= bytes
	return nil, true
}

// leave ends the waiting of the first in line.
func (m *workMemory) leave() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiting = false
}
