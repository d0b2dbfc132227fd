// Package trash deletes directory trees in the background.
//
// # Contract
//
// A directory on disk is the queue. Take moves a tree there by one rename, which either succeeds or
// leaves the tree unchanged. Run deletes the trees in the queue one at a time, so that deletion
// leaves the disk to the containers. Trees of an earlier process are included. A tree that cannot
// be deleted, or takes longer than deleteTimeout, does not delay other trees. Run tries it again
// with growing pauses. The size of a tree counts until it is deleted.
//
// A caller that must report free space waits with Since.
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
	trees    trees
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
		trees:  trees{known: map[string]*tree{}},
		wake:   make(chan struct{}, 1),
	}
}

// trees has the trees that this process has moved to the trash, by name.
type trees struct {
	mu sync.Mutex
	// +checklocks:mu
	known map[string]*tree
}

type tree struct {
	number uint64 // of Take
	size   diskusage.Usage
	failed bool          // the last deletion failed
	tried  chan struct{} // closed after the first attempt to delete the tree
}

func (s *trees) add(name string, number uint64, size diskusage.Usage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[name] = &tree{number: number, size: size, tried: make(chan struct{})}
}

// end notes the end of an attempt to delete a tree.
func (s *trees) end(name string, deleted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.known[name]
	if t == nil { // of an earlier process
		return
	}
	if !t.failed {
		close(t.tried)
	}
	t.failed = true
	if deleted {
		delete(s.known, name)
	}
}

// after returns the channels of the trees with numbers greater than mark.
func (s *trees) after(mark uint64) (tried []<-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.known {
		if t.number > mark {
			tried = append(tried, t.tried)
		}
	}
	return tried
}

func (s *trees) sum(counts func(failed bool) bool) diskusage.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sum diskusage.Usage
	for _, t := range s.known {
		if counts(t.failed) {
			sum = sum.Add(t.size)
		}
	}
	return sum
}

// Usage returns the known disk usage of all trees in the trash.
func (t *Trash) Usage() diskusage.Usage { return t.trees.sum(func(bool) bool { return true }) }

// Deleting is Usage without the trees whose last deletion failed.
func (t *Trash) Deleting() diskusage.Usage {
	return t.trees.sum(func(failed bool) bool { return !failed })
}

// Take moves path, which is on the same filesystem, into the trash. size is its disk usage, zero if
// unknown. The error wraps fs.ErrNotExist if there is nothing at path.
func (t *Trash) Take(path string, size diskusage.Usage) error {
	number := t.count.Add(1)
	name := fmt.Sprintf("%s-%d", t.prefix, number)
	t.trees.add(name, number, size)
	failpoint.Reach("trash.take")
	if err := os.Rename(path, filepath.Join(t.dir, name)); err != nil {
		t.trees.end(name, true)
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

// maxWait limits the wait of Since. kubelet allows two minutes for a call.
const maxWait = time.Minute

// Since returns a function that waits until the trees are deleted that Take moves to the trash from
// now on. It does not wait longer than maxWait or until ctx ends, and not for a second attempt to
// delete a tree. Kubelet's eviction manager reads the free space right after it has removed
// containers and images, and then evicts pods.
func (t *Trash) Since() (wait func(ctx context.Context)) {
	mark := t.count.Load()
	return func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, maxWait)
		defer cancel()
		defer t.waits.BeginUpTo(maxWait, "deletion of removed files", t.dir)()
		for _, tried := range t.trees.after(mark) {
			select {
			case <-tried:
			case <-ctx.Done():
				return
			}
		}
	}
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
			t.trees.end(e.Name(), false)
			t.warnings.Warn(t.log, "delete from trash; will be retried", "path", path, "error", err)
			all = false
			continue
		}
		failpoint.Reach("trash.deleted")
		t.trees.end(e.Name(), true)
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
