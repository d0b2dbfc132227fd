package fill

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"berth/image/blobindex"
	"berth/internal/cleanup"
	"berth/internal/lograte"
	"berth/internal/task"
)

// Source reads ranges of one blob.
type Source interface {
	// Range returns size bytes of the blob from an offset. The Engine verifies them. It closes the
	// reader. If the bytes are wrong, and the reader is a Rejecter, it calls Reject before Close.
	// Calls may be concurrent. An error means that no host serves the blob now. The Engine then
	// asks again later. A Range must fail when it makes no progress for some time, because it holds
	// memory of Config.Memory. It must not read files of incomplete layers.
	Range(ctx context.Context, offset, size int64) (io.ReadCloser, error)
}

// Rejecter is a reader of a Source whose bytes came from one of several hosts.
type Rejecter interface {
	// Reject reports that the bytes do not belong to the blob. The Source should ask another host
	// next time.
	Reject()
}

// Inflater decompresses the spans of one blob. Calls are not concurrent.
type Inflater interface {
	// Span returns the out bytes of the tar to which in decompresses. in is the span's part of the
	// blob, from p.In on, and is verified. Another length, or an error with the code DataLoss,
	// means that the index is wrong.
	Span(ctx context.Context, p blobindex.Point, in []byte, out int64) ([]byte, error)
	Close() error
}

// Config is the configuration of an Engine. Zero values of numbers stand for the defaults.
type Config struct {
	Dir string // a directory on the filesystem of the layers, for a test of the kernel
	// Needed means that incomplete layers exist. Then only errors.ErrUnsupported counts as a
	// failure of the test, because the test could also fail for lack of disk space.
	Needed bool
	Memory int64         // limit of all spans that are being filled, in bytes; default 64 MiB
	Stall  time.Duration // how long a reader waits at most; default 60 s
	Retry  time.Duration // pause after the first failure of a source; it doubles up to 32 times this value; default 200 ms
	Sync   time.Duration // how often filled spans are recorded; default 1 s
	// HashStep is how many bytes of a layer's tar are hashed at a time while the layer is filled;
	// default 32 MiB.
	HashStep int64
	// Room, if not nil, returns an error if the filesystem has no room for layers.
	Room func() error
	// Proofs is the number of failed attempts of a proof after which the layer is given up. An
	// attempt may fail for lack of memory, for example. Default 600.
	Proofs int
	// Waited, if not nil, is called with how long an access has waited. It must not block.
	Waited func(time.Duration)
	// Group and Ring are the files of an earlier Engine (Keep), which must have ended. The Engine
	// owns them, even after an error. Both are nil, or none.
	Group, Ring *os.File

	Waits *task.Waits // nil: no recording
	Log   *slog.Logger
}

const (
	// DefaultStall is the default of Config.Stall.
	DefaultStall = time.Minute

	defaultMemory = 64 << 20
	defaultRetry  = 200 * time.Millisecond
	defaultSync   = time.Second
	maxRetries    = 5 // doublings of Retry
	// syncBytes is the number of filled bytes from which they are synced at once.
	syncBytes = 64 << 20
	// maxBackground is how many requests fill layers in the background at a time.
	maxBackground = 4
	// closeTimeout limits the wait for each layer in Close.
	closeTimeout = 5 * time.Second
)

func (c *Config) setDefaults() {
	c.Memory = cmp.Or(c.Memory, defaultMemory)
	c.Stall = cmp.Or(c.Stall, DefaultStall)
	c.Retry = cmp.Or(c.Retry, defaultRetry)
	c.Sync = cmp.Or(c.Sync, defaultSync)
	c.Proofs = cmp.Or(c.Proofs, defaultProofs)
	c.HashStep = cmp.Or(c.HashStep, defaultHashStep)
	if c.Waited == nil {
		c.Waited = func(time.Duration) {}
	}
	if c.Room == nil {
		c.Room = func() error { return nil }
	}
}

// Engine fills layers. Its methods may be called concurrently.
type Engine struct {
	cfg      Config
	group    *group
	ring     *ring
	tookOver bool
	life     *task.Lifetime

	memory     *semaphore.Weighted // of Config.Memory
	background *semaphore.Weighted // of half of it, for background filling
	turns      *semaphore.Weighted // requests in the background

	free      chan int      // slots of the ring without an event
	slots     int           // how many the Engine uses
	inherited []*waiter     // events of an earlier Engine, until Start
	wakeSync  chan struct{} // a layer has filled spans to record
	wakeStall chan struct{} // signals that stalling is no longer empty

	warnAnswer, warnUnknown lograte.Limiter
	counts                  counters

	// mu guards the fields below, and the fields of layers and waiters whose comments say so. It is
	// held for operations in memory only.
	mu       sync.Mutex
	started  bool
	layers   map[uint64]*Layer // by inode of the data file
	stalling list.List         // of *waiter, oldest first
}

type counters struct{ events, waited, denied, filled, failures atomic.Uint64 }

// Stats are the counts since the start of the Engine.
type Stats struct {
	Events   uint64 // accesses of incomplete layers that the kernel has reported
	Waited   uint64 // of these, accesses that had to wait
	Denied   uint64 // of these, accesses that failed with EIO
	Filled   uint64 // bytes of tars written
	Failures uint64 // failed attempts to fetch or fill
	Waiting  int    // accesses that wait now
	Layers   int    // incomplete layers now
}

// Open tests the kernel and creates an Engine, or takes over the events of an earlier one. The
// Engine serves no event before Start. The error is errors.ErrUnsupported if the kernel (before
// Linux 6.15) or the filesystem cannot report reads of an EROFS mount.
func Open(cfg Config) (_ *Engine, err error) {
	cfg.setDefaults()
	undo := cleanup.New()
	defer undo.Run(&err)
	for _, f := range []*os.File{cfg.Group, cfg.Ring} {
		if f != nil {
			undo.Add("close "+f.Name(), f.Close)
		}
	}
	if err := probe(cfg.Dir); err != nil {
		err = fmt.Errorf("probe lazy layers in %s: %w", cfg.Dir, err)
		if !cfg.Needed || errors.Is(err, errors.ErrUnsupported) {
			return nil, err
		}
		cfg.Log.Warn("cannot test whether the kernel reports reads of incomplete layers", "error", err)
	}
	e := &Engine{cfg: cfg, tookOver: cfg.Group != nil, life: task.NewLifetime(), layers: map[uint64]*Layer{},
		memory: semaphore.NewWeighted(cfg.Memory), background: semaphore.NewWeighted(cfg.Memory / 2),
		turns: semaphore.NewWeighted(maxBackground), wakeSync: make(chan struct{}, 1), wakeStall: make(chan struct{}, 1)}
	if e.tookOver {
		err = e.takeOver()
	} else {
		err = e.create()
	}
	if err != nil {
		return nil, err
	}
	undo.Release()
	return e, nil
}

// create creates the group and the ring.
func (e *Engine) create() (err error) {
	if e.group, err = newGroup(); err != nil {
		return err
	}
	if e.ring, err = newRing(); err != nil {
		return errors.Join(err, e.group.file.Close())
	}
	_, free := e.ring.pending()
	e.setFree(free)
	return nil
}

// setFree sets the slots that the Engine uses. Each unanswered event takes a descriptor of the
// process. If no descriptor is free, the kernel fails the access.
func (e *Engine) setFree(free []int) {
	var files unix.Rlimit
	most := ringSlots
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil {
		most = int(min(uint64(most), files.Cur/4))
	}
	e.slots = max(min(len(free), most), 1)
	e.free = make(chan int, ringSlots)
	for _, i := range free[:min(e.slots, len(free))] {
		e.free <- i
	}
}

// TookOver reports whether the Engine continues the group of an earlier one. Otherwise all mounts
// of incomplete layers that exist already show zeros for missing ranges.
func (e *Engine) TookOver() bool { return e.tookOver }

// Keep returns the files that each monitor of a container on an incomplete layer holds open. The
// Engine owns them.
func (e *Engine) Keep() (group, ring *os.File) { return e.group.file, e.ring.file }

// Start begins to serve events and to fill the layers. All incomplete layers must have been added
// or refused, because an event may be one of an earlier Engine.
func (e *Engine) Start() {
	e.mu.Lock()
	e.started = true
	for _, l := range e.layers {
		l.kick()
	}
	e.mu.Unlock()
	strict := e.resume()
	e.life.Spawn(func() { e.serve(strict) })
	e.life.Spawn(e.denyStalled)
	e.life.Spawn(e.syncAll)
}

// Stats returns the counts.
func (e *Engine) Stats() Stats {
	s := Stats{Events: e.counts.events.Load(), Waited: e.counts.waited.Load(), Denied: e.counts.denied.Load(),
		Filled: e.counts.filled.Load(), Failures: e.counts.failures.Load()}
	e.mu.Lock()
	defer e.mu.Unlock()
	s.Waiting = e.stalling.Len()
	for _, l := range e.layers {
		if !l.complete {
			s.Layers++
		}
	}
	return s
}

// Close ends the Engine. Waiting accesses wait for the next Engine, as long as another process
// holds the group. No other method may run during or after Close.
func (e *Engine) Close() error {
	e.life.Close()
	e.life.Cancel()
	err := e.life.WaitFor(closeTimeout)
	for _, l := range e.layers {
		err = errors.Join(err, l.end())
	}
	if err != nil {
		err = fmt.Errorf("end the filling of layers: %w", err)
	}
	for _, w := range e.inherited { // Start was not called
		w.release()
	}
	for at := e.stalling.Front(); at != nil; at = at.Next() {
		at.Value.(*waiter).release() //nolint:forcetypeassert // the list has nothing else
	}
	return errors.Join(err, e.ring.close(), e.group.file.Close())
}
