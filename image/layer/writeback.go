package layer

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// syncer flushes one filesystem to disk. The layers of an image finish together and each syncfs writes everybody's data,
// so concurrent callers share a sync: one runs at a time, and whoever asks during it waits for the next.
//
// When Wait returns nil, everything that its caller wrote since Begin is on disk. The kernel reports a write error only
// once. So a failed sync fails every Wait whose data it may have lost. Its methods may be called concurrently.
type syncer struct {
	sync   func() error
	turn   chan struct{} // held during a sync
	failed atomic.Int64  // syncs that have failed

	mu   sync.Mutex // guards next
	next *round     // that has not begun; nil: nobody waits for one
}

// round is one sync, for all who asked for it before it began.
type round struct {
	done chan struct{}
	err  error // valid after done
}

// newSyncer returns a syncer of the filesystem of dir, an open file, which is to be older than all that is synced: what
// cannot be written back is reported once for each open file (Linux 5.8).
func newSyncer(dir *os.File) *syncer {
	return &syncer{sync: func() error { return unix.Syncfs(int(dir.Fd())) }, turn: make(chan struct{}, 1)}
}

// errNotWritten is returned to those whose data may be what an earlier sync could not write.
var errNotWritten = errors.New("not all that was written meanwhile has come to the disk")

// Begin is to be called before data is written that is to be synced.
func (s *syncer) Begin() (since int64) { return s.failed.Load() }

// Wait returns when everything that was written since Begin is on the disk, or has failed to come there.
func (s *syncer) Wait(since int64) error {
	r, leads := s.board()
	return s.ride(r, leads, since)
}

// ride returns when a round that was boarded has ended.
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

// board returns the round that begins next, and whether the caller has to run it.
func (s *syncer) board() (r *round, leads bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next, leads = &round{done: make(chan struct{})}, true
	}
	return s.next, leads
}

// run runs a round when the one before it has ended. From then on it is too late to board it.
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
