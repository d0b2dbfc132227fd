package stream

import (
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

const (
	// MaxOutput limits what ExecSync returns of stdout and stderr together, in bytes. Each of the
	// two streams may have at least half. The rest is discarded without an error (CRI: "the runtime
	// should cap").
	MaxOutput = 16 << 20
	// ownOutput is the part of each ExecSync's output that is not shared, in bytes. Probes write a
	// few hundred bytes, so probes do not fail if commands of other pods write without end.
	ownOutput = 64 << 10
	// maxHeld limits the output beyond ownOutput that all running ExecSyncs hold, in bytes.
	maxHeld = 128 << 20
)

// outputBudget limits the memory for the output of all ExecSyncs.
type outputBudget struct{ held atomic.Int64 }

// take reserves n bytes of the shared budget. The error is ResourceExhausted.
func (o *outputBudget) take(n int) error {
	if n > 0 && o.held.Add(int64(n)) > maxHeld { // a concurrent take that fails may make this one fail, too
		o.held.Add(-int64(n))
		return errdefs.New(codes.ResourceExhausted, "running commands have written more than %d bytes of output", maxHeld)
	}
	return nil
}

// capture keeps the beginning of a command's stdout and stderr. The lock guards data and taken.
type capture struct {
	all *outputBudget
	max int // of both streams together

	mu sync.Mutex
	// +checklocks:mu
	data [2][]byte
	// +checklocks:mu
	taken int // bytes reserved, which may exceed len(data)
}

func newCapture(all *outputBudget) *capture { return &capture{all: all, max: MaxOutput} }

// release returns the reserved bytes to the budget.
func (c *capture) release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all.held.Add(-int64(shared(c.taken)))
}

// kept returns what the command has written so far.
func (c *capture) kept() (stdout, stderr []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.data[0], c.data[1]
}

// shared returns the part of n bytes that counts against the shared budget.
func shared(n int) int { return max(n-ownOutput, 0) }

// writer returns the writer of stream 0, stdout, or 1, stderr.
func (c *capture) writer(stream int) io.Writer { return captureWriter{c, stream} }

type captureWriter struct {
	*capture
	stream int
}

// Write keeps the bytes that fit. If one stream has used more than half while the other was empty,
// it releases the excess when the other stream writes.
func (w captureWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	own, other := &w.data[w.stream], &w.data[1-w.stream]
	room := max(w.max-len(*other), w.max/2) - len(*own)
	keep := p[:max(min(len(p), room), 0)]
	if err := w.all.take(shared(w.taken+len(keep)) - shared(w.taken)); err != nil {
		return 0, err
	}
	w.taken += len(keep)
	*own = append(*own, keep...)
	*other = (*other)[:min(len(*other), w.max-len(*own))]
	return len(p), nil
}
