package layer

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

	"berth/internal/failpoint"
	"berth/internal/seldom"
	"berth/internal/task"
)

// trash deletes directories in the background. The directory trash is its
// queue: the goroutine looks into it whenever it is woken, so nothing put there is
// forgotten, be it by an error, the end of the process or of the machine.
type trash struct {
	dir    string
	remove func(ctx context.Context, dir string) error
	log    *slog.Logger
	seldom seldom.Seldom // for what cannot be deleted, which may be much and for long
	prefix string        // makes names differ from those of earlier processes
	count  atomic.Uint64
	sizes  sizes
	wake   chan struct{} // holds one: look again
	ctx    context.Context
	quit   context.CancelFunc
	done   chan struct{}
}

func newTrash(dir string, remove func(context.Context, string) error, log *slog.Logger) *trash {
	ctx, quit := context.WithCancel(context.Background())
	return &trash{
		dir: dir, remove: remove, log: log,
		prefix: strconv.FormatInt(time.Now().UnixNano(), 36),
		sizes:  sizes{of: map[string]Usage{}},
		wake:   make(chan struct{}, 1), ctx: ctx, quit: quit, done: make(chan struct{}),
	}
}

// sizes knows what is taken by the things in the trash, as far as it is known.
type sizes struct {
	mu sync.Mutex // guards of
	of map[string]Usage
}

func (s *sizes) set(name string, u Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[name] = u; u == (Usage{}) {
		delete(s.of, name)
	}
}

func (s *sizes) sum() Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sum Usage
	for _, u := range s.of {
		sum = sum.Add(u)
	}
	return sum
}

// take moves path, on the same filesystem, into the trash. size is what it takes
// on disk until it is deleted, zero if that is not known.
func (t *trash) take(path string, size Usage) error {
	name := fmt.Sprintf("%s-%d", t.prefix, t.count.Add(1))
	t.sizes.set(name, size)
	failpoint.Reach("layer.discard")
	if err := os.Rename(path, filepath.Join(t.dir, name)); err != nil {
		t.sizes.set(name, Usage{})
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

// start starts the goroutine, which looks at once.
func (t *trash) start() {
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

// stop waits for the goroutine to end, which leaves the deletion it is at unfinished.
func (t *trash) stop() {
	t.quit()
	<-t.done
}

// empty deletes what is in the trash. What cannot be deleted stays for the next time; it returns false then.
func (t *trash) empty() (all bool) {
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
			t.seldom.Warn(t.log, "a layer could not be deleted and will be tried again", "path", path, "err", err)
			all = false
			continue
		}
		failpoint.Reach("layer.deleted")
		t.sizes.set(e.Name(), Usage{})
	}
	return all
}
