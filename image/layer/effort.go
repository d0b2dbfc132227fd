package layer

import (
	"context"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// Effort bounds what the joins of one image take in the daemon, where no other limit ends them: a hard link's
// target may lead through forty symlinks of a thousand names, each of which is looked for in hundreds of layers.
// It ends with a context, too. Its methods may be called concurrently.
type Effort struct {
	ctx  context.Context
	left atomic.Int64
}

// What things take, in units of about a microsecond.
const (
	allEffort  = 32 << 20 // of an image: less than a minute of CPU time, for up to four million look-ups
	longEffort = 1 << 16  // that a join needs nothing is written down if finding it out took more than that
	stepEffort = 1        // a name that is known
	openEffort = 8        // a directory that is opened, and a name in it that is looked at
)

// newEffort returns so much effort, until ctx is done.
func newEffort(ctx context.Context, units int64) *Effort {
	e := &Effort{ctx: ctx}
	e.left.Store(units)
	return e
}

// step pays for a step from one directory to the next.
func (e *Effort) step() error { return e.pay(stepEffort) }

// steps pays for so many.
func (e *Effort) steps(n int) error { return e.pay(int64(n) * stepEffort) }

// open pays for opening a directory; the kernel looks up each name of its path.
func (e *Effort) open(dir string) error { return e.pay(openEffort + int64(strings.Count(dir, "/"))) }

func (e *Effort) pay(cost int64) error {
	if e.ctx.Err() != nil {
		return context.Cause(e.ctx)
	}
	if e.left.Add(-cost) < 0 {
		return errdefs.New(codes.ResourceExhausted, "its layers lead to each other on too many and too long ways")
	}
	return nil
}
