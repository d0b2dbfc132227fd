package image

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/internal/rootfs"
	"berth/internal/task"
)

// flightKey says which downloads are the same: one blob that is to become one
// layer, from one registry. Another registry does not count: it could keep a
// download of somebody else's layer waiting.
type flightKey struct {
	domain     string
	repository string // of a download that only shows that it has the blob; empty: any of the registry
	blob       digest.Digest
	diffID     digest.Digest
	kind       rootfs.Kind // of the store that it is to be in; empty: in none
}

// flights lets pulls of the same layer share one download.
type flights struct {
	ctx context.Context // ends all of them
	log *slog.Logger
	wg  sync.WaitGroup

	mu     sync.Mutex // guards active and waiters of its flights
	active map[flightKey]*flight
}

// flight is a download under way.
type flight struct {
	by      registry.Reference // whose download it is
	bytes   *atomic.Int64      // received
	waiters int
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // valid after done
}

func newFlights(ctx context.Context, log *slog.Logger) *flights {
	return &flights{ctx: ctx, log: log, active: map[flightKey]*flight{}}
}

// join waits for the flight of a key, starting it by run if there is none. It
// reports whether it did: the failure of somebody else's download may have
// reasons that ours does not have. by is the image for which
// the flight was started. onStart is told where the bytes are counted.
//
// The download does not end with ctx but when nobody waits for it any more; the
// last to leave waits until it has ended.
func (f *flights) join(ctx context.Context, key flightKey, ref registry.Reference, onStart func(*atomic.Int64), run func(context.Context, *atomic.Int64) error) (by registry.Reference, started bool, err error) {
	fl, started := f.board(key, ref, run)
	onStart(fl.bytes)
	select {
	case <-fl.done:
		return fl.by, started, fl.err
	case <-ctx.Done():
		f.leave(key, fl)
		return fl.by, started, ctx.Err()
	}
}

func (f *flights) board(key flightKey, ref registry.Reference, run func(context.Context, *atomic.Int64) error) (fl *flight, started bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl, ok := f.active[key]; ok {
		fl.waiters++
		return fl, false
	}
	ctx, cancel := context.WithCancel(f.ctx)
	fl = &flight{by: ref, bytes: new(atomic.Int64), waiters: 1, cancel: cancel, done: make(chan struct{})}
	f.active[key] = fl
	f.wg.Go(func() {
		defer cancel()
		fl.err = task.Guard(f.log, "fetch", "layer "+key.diffID.String(), func() error { return run(ctx, fl.bytes) })
		f.remove(key, fl)
		close(fl.done)
	})
	return fl, true
}

// leave takes a waiter off; without any the flight is cancelled and its place is
// free for another one.
func (f *flights) leave(key flightKey, fl *flight) {
	f.mu.Lock()
	fl.waiters--
	last := fl.waiters == 0
	if last && f.active[key] == fl {
		delete(f.active, key)
	}
	f.mu.Unlock()
	if last {
		fl.cancel()
		<-fl.done
	}
}

func (f *flights) remove(key flightKey, fl *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.active[key] == fl {
		delete(f.active, key)
	}
}

// wait returns when no flight is left. The caller sees to it that none begins.
func (f *flights) wait() { f.wg.Wait() }
