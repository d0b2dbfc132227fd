package stream

import (
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

const (
	// MaxOutput is what ExecSync returns of both streams together, each of which may have half of it at least; the rest is
	// discarded without error (CRI: "the runtime should cap").
	MaxOutput = 16 << 20
	// ownOutput is what each ExecSync may hold whatever the others do, so that commands which write without end keep no other
	// pod's probes from answering: these write some hundred bytes.
	ownOutput = 64 << 10
	// maxHeld is what all ExecSyncs under way may hold of their commands' output beyond that.
	maxHeld = 128 << 20
)

// outputBudget bounds what ExecSyncs hold of their commands' output, all together.
type outputBudget struct{ held atomic.Int64 }

// take makes room for n bytes more, beyond what is each one's own. ResourceExhausted.
func (o *outputBudget) take(n int) error {
	if n > 0 && o.held.Add(int64(n)) > maxHeld { // nothing is taken also while another tries to take too much
		o.held.Add(-int64(n))
		return errdefs.New(codes.ResourceExhausted, "commands that run at the moment have written more than %d bytes", maxHeld)
	}
	return nil
}

// capture keeps the beginnings of a command's stdout and stderr. The lock guards all but all itself, and is held to copy bytes.
type capture struct {
	all *outputBudget
	max int // of both together

	mu    sync.Mutex
	data  [2][]byte
	taken int // and kept, unless one stream made room for the other
}

func newCapture(all *outputBudget) *capture { return &capture{all: all, max: MaxOutput} }

// release gives up the room for what is kept.
func (c *capture) release() { c.all.held.Add(-int64(shared(c.taken))) }

// shared is how much of n bytes is not a command's own.
func shared(n int) int { return max(n-ownOutput, 0) }

// writer is for one of the two streams.
func (c *capture) writer(stream int) io.Writer { return captureWriter{c, stream} }

type captureWriter struct {
	*capture
	stream int
}

// Write keeps what there is room for. The longer of two streams, which had room as long as it was alone, makes room for the other.
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
