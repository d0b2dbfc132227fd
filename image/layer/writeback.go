package layer

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// syncer flushes one filesystem to disk. The layers of an image finish together, and each syncfs
// writes the data of all of them. So concurrent callers share a sync: one runs at a time, and later
// callers wait for the next one.
//
// When Wait returns nil, everything that its caller wrote since Begin is on disk. The kernel
// reports a write error only once. So a failed sync fails every Wait whose data it may have lost.
// Its methods may be called concurrently.
type syncer struct {
	sync   func() error
	turn   chan struct{} // a lock: held during a sync
	failed atomic.Int64  // number of failed syncs

	mu   sync.Mutex // guards next
	next *round     // the sync that starts next; nil: nothing waits for one
}

// round is one sync, shared by all callers that asked before it started.
type round struct {
	done chan struct{}
	err  error // valid after done
}

// newSyncer returns a syncer for the filesystem of dir, an open file. dir must be opened before the
// data is written: the kernel reports a write error once to each open file (Linux 5.8).
func newSyncer(dir *os.File) *syncer {
	return &syncer{sync: func() error { return unix.Syncfs(int(dir.Fd())) }, turn: make(chan struct{}, 1)}
}

// errNotWritten is returned to callers whose data an earlier sync may have failed to write.
var errNotWritten = errors.New("not all that was written meanwhile has come to the disk")

// Begin must be called before the data is written that Wait waits for.
func (s *syncer) Begin() (since int64) { return s.failed.Load() }

// Wait returns when everything written since Begin is on disk, or could not be written.
func (s *syncer) Wait(since int64) error {
	r, leads := s.board()
	return s.ride(r, leads, since)
}

// ride waits for the end of a joined round.
func (s *syncer) ride(r *round, leads bool, since int64) error {
	if leads {
		s.run(r)
	}
	<-r.done
	if r.err == nil && s.failed.Load() != since {
		return errNotWritten
	}
	return r.err
}

// board joins the next round, and reports whether the caller has to run it.
func (s *syncer) board() (r *round, leads bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next, leads = &round{done: make(chan struct{})}, true
	}
	return s.next, leads
}

// run runs a round after the one before it. Once it starts, new callers join the next one.
func (s *syncer) run(r *round) {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	s.mu.Lock()
	s.next = nil
	s.mu.Unlock()
	if r.err = s.sync(); r.err != nil {
		s.failed.Add(1)
	}
	close(r.done)
}
