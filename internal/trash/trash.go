// Package trash deletes directory trees in the background.
//
// # Contract
//
// A directory on disk is the queue. Take moves a tree there by one rename, which either succeeds or
// leaves the tree unchanged. Run deletes the trees in the queue one at a time, so that deletion
// leaves the disk to the containers. Trees of an earlier process are included. A tree that cannot
// be deleted, or takes longer than deleteTimeout, does not delay other trees. Run tries it again
// with growing pauses. The size of a tree counts until it is deleted.
package trash

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"berth/internal/diskusage"
	"berth/internal/failpoint"
	"berth/internal/lograte"
	"berth/internal/task"
)

// Trash is one queue of trees to delete. Its methods may be called concurrently.
type Trash struct {
	dir      string
	remove   func(ctx context.Context, path string) error
	waits    Waits
	log      *slog.Logger
	warnings lograte.Limiter
	prefix   string // distinguishes names from those of earlier processes
	count    atomic.Uint64
	sizes    sizes
	wake     chan struct{} // holds one token: read the directory again
}

// Waits records the deletions in progress. *task.Waits and *task.Runner implement it.
type Waits interface {
	BeginUpTo(timeout time.Duration, what, object string) (end func())
}

// New returns the trash in dir, a directory that exists and has no other use. remove deletes a
// tree. It may return early when its context is done. No tree is deleted before Run.
func New(dir string, remove func(ctx context.Context, path string) error, waits Waits, log *slog.Logger) *Trash {
	return &Trash{
		dir: dir, remove: remove, waits: waits, log: log,
		prefix: strconv.FormatInt(time.Now().UnixNano(), 36),
		sizes:  sizes{of: map[string]diskusage.Usage{}, failed: map[string]bool{}},
		wake:   make(chan struct{}, 1),
	}
}

// sizes has the known disk usage of the trees in the trash, by name.
type sizes struct {
	mu sync.Mutex
	// +checklocks:mu
	of map[string]diskusage.Usage
	// +checklocks:mu
	failed map[string]bool // the last deletion failed
}

func (s *sizes) set(name string, u diskusage.Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of[name] = u
}

func (s *sizes) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, name)
	delete(s.failed, name)
}

func (s *sizes) setFailed(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed[name] = true
}

func (s *sizes) sum(counts func(failed bool) bool) diskusage.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sum diskusage.Usage
	for name, u := range s.of {
		if counts(s.failed[name]) {
			sum = sum.Add(u)
		}
	}
	return sum
}

// Usage returns the known disk usage of all trees in the trash.
func (t *Trash) Usage() diskusage.Usage { return t.sizes.sum(func(bool) bool { return true }) }

// Deleting is Usage without the trees whose last deletion failed.
func (t *Trash) Deleting() diskusage.Usage {
	return t.sizes.sum(func(failed bool) bool { return !failed })
}

// Take moves path, which is on the same filesystem, into the trash. size is its disk usage, zero if
// unknown. The error wraps fs.ErrNotExist if there is nothing at path.
func (t *Trash) Take(path string, size diskusage.Usage) error {
	name := fmt.Sprintf("%s-%d", t.prefix, t.count.Add(1))
	t.sizes.set(name, size)
	failpoint.Reach("trash.take")
	if err := os.Rename(path, filepath.Join(t.dir, name)); err != nil {
		t.sizes.forget(name)
		return fmt.Errorf("move %s to the trash: %w", path, err)
	}
	failpoint.Reach("trash.taken")
	select {
	case t.wake <- struct{}{}:
	default: // Run is about to read the directory
	}
	return nil
}

// Discard is Take for a path that need not exist and whose size does not count.
func (t *Trash) Discard(path string) error {
	if err := t.Take(path, diskusage.Usage{}); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Pauses before Run tries a failed deletion again.
const (
	firstPause = time.Second
	maxPause   = time.Minute
)

// Run deletes the trees in the trash until ctx ends. It then leaves the current deletion
// unfinished.
func (t *Trash) Run(ctx context.Context) {
	for pause := firstPause; ; {
		var again <-chan time.Time
		if t.empty(ctx) {
			pause = firstPause
		} else {
			again = time.After(pause)
			pause = min(2*pause, maxPause)
		}
		select {
		case <-t.wake:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// empty tries to delete all trees in the trash, and reports whether it has deleted all.
func (t *Trash) empty(ctx context.Context) (all bool) {
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		t.warnings.Warn(t.log, "read trash", "dir", t.dir, "error", err)
		return false
	}
	all = true
	for _, e := range entries {
		if ctx.Err() != nil {
			return false
		}
		path := filepath.Join(t.dir, e.Name())
		failpoint.Reach("trash.delete")
		err := t.delete(ctx, path)
		if err != nil && ctx.Err() != nil {
			return false
		}
		if err != nil {
			t.sizes.setFailed(e.Name())
			t.warnings.Warn(t.log, "delete from trash; will be retried", "path", path, "error", err)
			all = false
			continue
		}
		failpoint.Reach("trash.deleted")
		t.sizes.forget(e.Name())
	}
	return all
}

// deleteTimeout limits one attempt to delete a tree. The next attempt continues where it stopped.
const deleteTimeout = 10 * time.Minute

// delete deletes a tree.
func (t *Trash) delete(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, deleteTimeout)
	defer cancel()
	defer t.waits.BeginUpTo(deleteTimeout, "deletion from the trash", path)()
	return task.Guard(t.log, "delete", path, func() error { return t.remove(ctx, path) })
}
