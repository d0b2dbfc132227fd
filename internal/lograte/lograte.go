// Package seldom keeps what goes wrong with every call from filling the log.
//
// # Contract
//
// Of the warnings given to one Limiter the first of a minute is logged, with the number
// of those that were not since the one before. Its methods may be called from any
// number of goroutines; they do not wait.
package lograte

import (
	"log/slog"
	"sync/atomic"
	"time"
)

const interval = time.Minute

// Limiter is ready for use as it is.
type Limiter struct {
	next    atomic.Pointer[time.Time] // with its monotonic reading: the clock may be set
	skipped atomic.Int64
}

// Warn logs a warning like log.Warn, or counts it.
func (s *Limiter) Warn(log *slog.Logger, message string, args ...any) {
	s.warn(time.Now(), log, message, args...)
}

func (s *Limiter) warn(now time.Time, log *slog.Logger, message string, args ...any) {
	next := s.next.Load()
	then := now.Add(interval)
	if next != nil && now.Before(*next) || !s.next.CompareAndSwap(next, &then) {
		s.skipped.Add(1)
		return
	}
	log.Warn(message, append(args, "suppressed", s.skipped.Swap(0))...)
}
