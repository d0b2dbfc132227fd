package layer

import (
	"context"
	"strings"
	"sync/atomic"

	"berth/internal/errdefs"
)

// Effort limits the work for stacking one image in the daemon, and ends with a context. A hard
// link's path may contain forty symlinks of a thousand names, and each name may be searched in
// hundreds of layers. Its methods may be called concurrently.
type Effort struct {
	ctx  context.Context
	left atomic.Int64
}

// Costs, in units of about a microsecond.
const (
	allEffort  = 32 << 20 // the limit for an image: under a minute of CPU time, up to four million lookups
	longEffort = 1 << 16  // the result of a check that costs more is recorded
	stepEffort = 1        // a cached name
	openEffort = 8        // opening a directory and looking up a name in it
)

// newEffort returns an Effort of the given units that ends with ctx.
func newEffort(ctx context.Context, units int64) *Effort {
	e := &Effort{ctx: ctx}
	e.left.Store(units)
	return e
}

// step pays for a step from a directory to an entry.
func (e *Effort) step() error { return e.pay(stepEffort) }

// steps pays for n steps.
func (e *Effort) steps(n int) error { return e.pay(int64(n) * stepEffort) }

// open pays for opening a directory; the kernel looks up each name of its path.
func (e *Effort) open(dir string) error { return e.pay(openEffort + int64(strings.Count(dir, "/"))) }

func (e *Effort) pay(cost int64) error {
	if e.ctx.Err() != nil {
		return context.Cause(e.ctx)
	}
	if e.left.Add(-cost) < 0 {
		return errdefs.FailedPrecondition("resolving links across layers exceeds the work limit")
	}
	return nil
}
