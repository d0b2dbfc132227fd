// Package budget shares the node's capacity for unpacking among all layers.
//
// # Contract
//
// A layer is unpacked only inside [Budget.Run]. Run waits for a slot, which registries share
// fairly, and gives the layer's process a part of the memory. No layer waits for memory at its
// first attempt. If the process ends because its part was too small, [Budget.Grow] says whether
// another attempt can get more. The other attempt waits for it
// (docs/adr/015-pull-memory-budget.md).
package budget

import (
	"context"
	"fmt"

	"berth/image/unpack"
	"berth/internal/fair"
	"berth/internal/task"
	"berth/internal/trace"
)

// Config configures a Budget.
type Config struct {
	Limits  unpack.Limits // of one layer
	Memory  int64         // bytes that all processes together may keep of their layers; 0: only Limits counts
	Merging int64         // bytes for merging layers; 0: erofs.MaxMemory
	Slots   int           // concurrent processes; 0: DefaultSlots
	Waits   *task.Waits   // nil: no recording
}

// DefaultSlots is the default of Config.Slots. Each process takes some megabytes.
const DefaultSlots = 64

// Budget is the capacity of one node. Its methods may be called concurrently.
type Budget struct {
	limits unpack.Limits
	slots  *fair.Slots
	memory *memory
	waits  *task.Waits
}

// New returns an unused budget.
func New(cfg Config) *Budget {
	if cfg.Slots <= 0 {
		cfg.Slots = DefaultSlots
	}
	return &Budget{limits: cfg.Limits.WithDefaults(), slots: fair.NewSlots(cfg.Slots),
		memory: newMemory(cfg.Memory, cfg.Merging, cfg.Slots), waits: cfg.Waits}
}

// Limits returns the limits of one layer that has the whole budget.
func (b *Budget) Limits() unpack.Limits { return b.limits }

// Run calls make with the limits of a layer, and returns these limits. During the call it holds
// memory and an unpack slot of origin. Slots are shared among origins. An origin is a registry, or
// another name for a source of blobs. what names the layer in waits.
func (b *Budget) Run(ctx context.Context, origin, what string, more Shortage,
	make func(unpack.Limits) error) (had unpack.Limits, err error) {
	waiting := trace.Begin(ctx, "wait for unpack slot")
	defer waiting.End() // after an error
	release, err := b.slots.Acquire(ctx, origin)
	if err != nil {
		return had, fmt.Errorf("unpack: %w", err)
	}
	defer release()
	waiting.End()
	defer trace.Begin(ctx, "unpack").End()
	limits, giveBack, err := b.withMemory(ctx, what, more)
	if err != nil {
		return had, err
	}
	defer giveBack()
	return limits, make(limits)
}

// withMemory returns the limits of a layer with its share of the memory. It waits if an earlier
// attempt needed more.
func (b *Budget) withMemory(ctx context.Context, what string, more Shortage) (_ unpack.Limits, release func(),
	err error) {
	if more == (Shortage{}) {
		limits, release := b.memory.share(b.limits)
		return limits, release, nil
	}
	defer b.waits.BeginOpen("unpack memory", what)()
	return b.memory.wait(ctx, b.limits, more)
}

// Shortage says which resources were too small for an earlier attempt. The zero value is the first
// attempt.
type Shortage struct{ memory, window bool }

// Grow records why an attempt failed, and reports whether another one can get more than the limits
// in had.
func (b *Budget) Grow(n Shortage, had unpack.Limits, err error) (Shortage, bool) {
	m := b.memory
	if m == nil || err == nil {
		return n, false
	}
	switch unpack.CodeOf(err) {
	case unpack.MoreMemory:
		if n.memory || had.Memory >= m.most {
			return n, false
		}
		n.memory = true
	case unpack.MoreWindow:
		if n.window {
			return n, false
		}
		n.window = true
	default:
		return n, false
	}
	return n, true
}

// TrySlot takes a slot of origin if one is free for it. The caller calls release once.
func (b *Budget) TrySlot(origin string) (release func(), ok bool) { return b.slots.TryAcquire(origin) }

// MemoryInUse returns the bytes that layers use in addition to the minimum of each process.
func (b *Budget) MemoryInUse() int64 {
	if b.memory == nil {
		return 0
	}
	b.memory.mu.Lock()
	defer b.memory.mu.Unlock()
	return b.memory.rest - b.memory.free
}
