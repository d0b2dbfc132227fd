// Package writeback brings to the disk what several have written, for all of them at once: the layers of an image come to
// their ends together, and each syncfs writes what anybody has written to the filesystem.
//
// # Contract
//
// When Wait has returned nil, everything that its caller wrote since Begin is on the disk, whoever's sync it was. A sync that
// fails is told to all whose data it may be about: the kernel tells it only once, so the next sync says nothing of it. There is
// one sync at a time; whoever asks during one waits for the next, together with all others.
package writeback

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Syncer is that of one filesystem. Its methods may be called concurrently.
type Syncer struct {
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

// New returns a Syncer of the filesystem of dir, an open file, which is to be older than all that is synced: what
// cannot be written back is reported once for each open file (Linux 5.8).
func New(dir *os.File) *Syncer {
	return &Syncer{sync: func() error { return unix.Syncfs(int(dir.Fd())) }, turn: make(chan struct{}, 1)}
}

// errNotWritten is returned to those whose data may be what an earlier sync could not write.
var errNotWritten = errors.New("not all that was written meanwhile has come to the disk")

// Begin is to be called before data is written that is to be synced.
func (s *Syncer) Begin() (since int64) { return s.failed.Load() }

// Wait returns when everything that was written since Begin is on the disk, or has failed to come there.
func (s *Syncer) Wait(since int64) error {
	r, leads := s.board()
	return s.ride(r, leads, since)
}

// ride returns when a round that was boarded has ended.
func (s *Syncer) ride(r *round, leads bool, since int64) error {
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
func (s *Syncer) board() (r *round, leads bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.next, leads = &round{done: make(chan struct{})}, true
	}
	return s.next, leads
}

// run runs a round when the one before it has ended. From then on it is too late to board it.
func (s *Syncer) run(r *round) {
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
