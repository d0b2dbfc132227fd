package layer

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// syncer flushes one filesystem to disk. The layers of an image finish together, and each syncfs
// writes the data of all layers. So concurrent callers share a sync. One sync runs at a time, and
// later callers wait for the next sync.
//
// When Wait returns nil, all writes of its caller since Begin are on disk. The kernel reports a
// write error only once, so a failed sync fails every Wait whose data it may have lost. Its methods
// may be called concurrently.
type syncer struct {
	sync    func() error
	running chan struct{} // holds a token during a sync
	failed  atomic.Int64  // number of failed syncs

	mu sync.Mutex
	// +checklocks:mu
	next *round // the sync that starts next; nil: no caller waits for it
}

// round is one sync, shared by all callers that asked before it started.
type round struct {
	done chan struct{}
	err  error // valid after done
}

// newSyncer returns a syncer for the filesystem of dir. The caller must open dir before it writes,
// because the kernel reports a write error once to each open file (Linux 5.8).
func newSyncer(dir *os.File) *syncer {
	return &syncer{sync: func() error { return unix.Syncfs(int(dir.Fd())) }, running: make(chan struct{}, 1)}
}

// errNotWritten is returned to callers whose data an earlier sync may have failed to write.
var errNotWritten = errors.New("an earlier sync failed and may have lost this data")

// Begin must be called before the caller writes its data.
func (s *syncer) Begin() (since int64) { return s.failed.Load() }

// Wait waits until the data that was written since Begin is on disk.
func (s *syncer) Wait(since int64) error {
	r, leads := s.enter()
	return s.waitFor(r, leads, since)
}

// waitFor waits for a round, and runs it if leads is set.
func (s *syncer) waitFor(r *round, leads bool, since int64) error {
	if leads {
		s.run(r)
	}
	<-r.done
	if r.err == nil && s.failed.Load() != since {
		return errNotWritten
	}
	return r.err
}

// enter returns the next round, and reports whether the caller must run it.
func (s *syncer) enter() (r *round, leads bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next, leads = &round{done: make(chan struct{})}, true
	}
	return s.next, leads
}

// run runs a round after the previous round. When it starts, new callers get the next round.
func (s *syncer) run(r *round) {
	s.running <- struct{}{}
	defer func() { <-s.running }()
	s.mu.Lock()
	s.next = nil
	s.mu.Unlock()
	if r.err = s.sync(); r.err != nil {
		s.failed.Add(1)
	}
	close(r.done)
}
