package pull

import (
	"context"
	"log/slog"
	"sync"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/internal/rootfs"
	"berth/internal/task"
)

// flightKey identifies a shared download: one blob that becomes one layer, from one registry. Pulls
// from different registries share no download, because one registry could stall pulls from the
// other.
type flightKey struct {
	domain     string
	repository string // set if the download only proves access to this repository
	blob       digest.Digest
	diffID     digest.Digest
	kind       rootfs.Kind // form of the new layer; empty if the download only proves access
}

// flights shares one download among concurrent pulls of the same layer.
type flights struct {
	ctx context.Context // its end cancels all downloads
	log *slog.Logger
	wg  sync.WaitGroup

	mu sync.Mutex // guards active and the waiters of its flights
	// +checklocks:mu
	active map[flightKey]*flight
}

// flight is one download.
type flight struct {
	by      registry.Reference // the image that started it
	bytes   *transfer
	waiters int
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // valid after done
}

func newFlights(ctx context.Context, log *slog.Logger) *flights {
	return &flights{ctx: ctx, log: log, active: map[flightKey]*flight{}}
}

// join waits for the download of a key, and returns its error. If the key has none, join starts a
// download with run, and returns started. by is the image whose pull started the download. onStart
// receives the counter of received bytes.
//
// If another pull started the download, its error may not concern the caller: that pull may lack
// access, for example. The caller then calls join again.
//
// The download does not end with ctx. The last waiter that leaves cancels the download, and waits
// for its end.
func (f *flights) join(ctx context.Context, key flightKey, ref registry.Reference, onStart func(*transfer),
	run func(context.Context, *transfer) error) (by registry.Reference, started bool, err error) {
	fl, started := f.find(key, ref, run)
	onStart(fl.bytes)
	select {
	case <-fl.done:
		return fl.by, started, fl.err
	case <-ctx.Done():
		f.leave(key, fl)
		return fl.by, started, ctx.Err()
	}
}

func (f *flights) find(
	key flightKey, ref registry.Reference, run func(context.Context, *transfer) error,
) (fl *flight, started bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl, ok := f.active[key]; ok {
		fl.waiters++
		return fl, false
	}
	ctx, cancel := context.WithCancel(f.ctx)
	fl = &flight{by: ref, bytes: new(transfer), waiters: 1, cancel: cancel, done: make(chan struct{})}
	f.active[key] = fl
	f.wg.Go(func() {
		defer cancel()
		fl.err = task.Guard(f.log, "fetch", "layer "+key.diffID.String(), func() error { return run(ctx, fl.bytes) })
		f.remove(key, fl)
		close(fl.done)
	})
	return fl, true
}

// leave removes a waiter. The last waiter cancels the download and frees its key.
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

// wait waits for all downloads. The caller ensures that no new download starts.
func (f *flights) wait() { f.wg.Wait() }
