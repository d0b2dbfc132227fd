// Package lograte limits how often a recurring warning is logged.
//
// # Contract
//
// A Limiter logs the first warning of each minute, with the number of warnings that it has
// suppressed since the previous message. Its methods may be called from any number of goroutines
// and do not block.
package lograte

import (
	"log/slog"
	"sync/atomic"
	"time"
)

const interval = time.Minute

// Limiter limits one kind of warning. The zero value is ready for use.
type Limiter struct {
	next    atomic.Pointer[time.Time] // has a monotonic reading, because the clock may be set
	skipped atomic.Int64
}

// Warn logs a warning like log.Warn, or suppresses and counts it.
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
