package image

import (
	"context"
	"fmt"
	"sync"
)

// turns bounds how many layers are unpacked at a time, each by a process of its own. A layer has its turn for as long as its
// registry takes to send it, so no registry gets more turns than it leaves for others: one that is slow, or several, do
// not keep those of the rest waiting.
type turns struct {
	mu    sync.Mutex // guards what follows
	free  int
	by    map[string]int // turns taken, by registry
	given chan struct{}  // closed when a turn is given back
}

func newTurns(most int) *turns {
	return &turns{free: most, by: map[string]int{}, given: make(chan struct{})}
}

// take waits for a turn for a layer of a registry. The caller gives it back.
func (t *turns) take(ctx context.Context, registry string) (giveBack func(), err error) {
	for {
		given, ok := t.try(registry)
		if ok {
			return func() { t.giveBack(registry) }, nil
		}
		select {
		case <-given:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for other layers to be unpacked: %w", ctx.Err())
		}
	}
}

// takeNow takes a turn if there is one, and does not wait.
func (t *turns) takeNow(registry string) (giveBack func(), ok bool) {
	if _, ok := t.try(registry); !ok {
		return nil, false
	}
	return func() { t.giveBack(registry) }, true
}

// try takes a turn if the registry may have one now; else it returns a channel that is closed when it is worth
// trying again.
func (t *turns) try(registry string) (given <-chan struct{}, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.by[registry] >= t.free {
		return t.given, false
	}
	t.free--
	t.by[registry]++
	return nil, true
}

func (t *turns) giveBack(registry string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.free++
	if t.by[registry]--; t.by[registry] == 0 {
		delete(t.by, registry)
	}
	close(t.given)
	t.given = make(chan struct{})
}
