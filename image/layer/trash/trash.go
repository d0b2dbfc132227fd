// Package trash deletes directories in the background.
//
// # Contract
//
// A directory on disk is the queue: the goroutine looks into it when it starts and whenever something is put there, so nothing is
// forgotten, be it by an error, the end of the process or of the machine. To put something there is one rename: it is gone from
// its place at once, or is still there. What can't be deleted is tried again, ever more seldom, and hinders nothing else; what it
// takes on disk counts until it is deleted.
package trash

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"berth/image/unpack"
	"berth/internal/failpoint"
	"berth/internal/lograte"
	"berth/internal/task"
)

// Trash is one such directory. Take and Usage may be called concurrently.
type Trash struct {
	dir    string
	remove func(ctx context.Context, dir string) error
	log    *slog.Logger
	seldom lograte.Limiter // for what cannot be deleted, which may be much and for long
	prefix string          // makes names differ from those of earlier processes
	count  atomic.Uint64
	sizes  sizes
	wake   chan struct{} // holds one: look again
	ctx    context.Context
	quit   context.CancelFunc
	done   chan struct{}
}

// New returns the trash in dir, which exists and belongs to it alone. remove deletes a directory, and may give up when its context is
// done. Nothing is deleted until Start.
func New(dir string, remove func(context.Context, string) error, log *slog.Logger) *Trash {
	ctx, quit := context.WithCancel(context.Background())
	return &Trash{
		dir: dir, remove: remove, log: log,
		prefix: strconv.FormatInt(time.Now().UnixNano(), 36),
		sizes:  sizes{of: map[string]unpack.Usage{}, stuck: map[string]bool{}},
		wake:   make(chan struct{}, 1), ctx: ctx, quit: quit, done: make(chan struct{}),
	}
}

// sizes knows what is taken by the things in the trash, as far as it is known.
type sizes struct {
	mu    sync.Mutex // guards what follows
	of    map[string]unpack.Usage
	stuck map[string]bool // what could not be deleted when that was tried last
}

func (s *sizes) set(name string, u unpack.Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[name] = u; u == (unpack.Usage{}) {
		delete(s.of, name)
		delete(s.stuck, name)
	}
}

func (s *sizes) setStuck(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stuck[name] = true
}

func (s *sizes) sum(of func(stuck bool) bool) unpack.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sum unpack.Usage
	for name, u := range s.of {
		if of(s.stuck[name]) {
			sum = sum.Add(u)
		}
	}
	return sum
}

// Usage is what is taken by the things in the trash, as far as it is known.
func (t *Trash) Usage() unpack.Usage { return t.sizes.sum(func(bool) bool { return true }) }

// Going is Usage without what could not be deleted when that was tried last.
func (t *Trash) Going() unpack.Usage { return t.sizes.sum(func(stuck bool) bool { return !stuck }) }

// Take moves path, on the same filesystem, into the trash. size is what it takes
// on disk until it is deleted, zero if that is not known.
func (t *Trash) Take(path string, size unpack.Usage) error {
	name := fmt.Sprintf("%s-%d", t.prefix, t.count.Add(1))
	t.sizes.set(name, size)
	failpoint.Reach("layer.discard")
	if err := os.Rename(path, filepath.Join(t.dir, name)); err != nil {
		t.sizes.set(name, unpack.Usage{})
		return fmt.Errorf("discard: %w", err)
	}
	failpoint.Reach("layer.discarded")
	select {
	case t.wake <- struct{}{}:
	default: // it is going to look anyway
	}
	return nil
}

// Pauses before what could not be deleted is tried again: the first, and the longest.
const (
	emptyAgain  = 10 * time.Second
	emptySeldom = 10 * time.Minute
)

// Start starts the goroutine, which looks at once.
func (t *Trash) Start() {
	go func() {
		defer close(t.done)
		for pause := emptyAgain; ; {
			var again <-chan time.Time
			if t.empty() {
				pause = emptyAgain
			} else {
				again = time.After(pause)
				pause = min(2*pause, emptySeldom)
			}
			select {
			case <-t.wake:
			case <-again:
			case <-t.ctx.Done():
				return
			}
		}
	}()
}

// Stop waits for the goroutine of Start to end, which leaves the deletion it is at unfinished.
func (t *Trash) Stop() {
	t.quit()
	<-t.done
}

// empty deletes what is in the trash. What cannot be deleted stays for the next time; it returns false then.
func (t *Trash) empty() (all bool) {
	entries, err := os.ReadDir(t.dir)
	all = err == nil
	if err != nil {
		t.seldom.Warn(t.log, "read trash of layers", "err", err)
	}
	for _, e := range entries {
		if t.ctx.Err() != nil {
			return false
		}
		path := filepath.Join(t.dir, e.Name())
		failpoint.Reach("layer.delete")
		err := task.Guard(t.log, "delete", "layer "+path, func() error { return t.remove(t.ctx, path) })
		if err != nil && t.ctx.Err() != nil {
			return false
		}
		if err != nil {
			t.sizes.setStuck(e.Name())
			t.seldom.Warn(t.log, "a layer could not be deleted and will be tried again", "path", path, "err", err)
			all = false
			continue
		}
		failpoint.Reach("layer.deleted")
		t.sizes.set(e.Name(), unpack.Usage{})
	}
	return all
}
