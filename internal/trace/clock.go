package trace

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns CLOCK_MONOTONIC in nanoseconds. Package time reads the same clock without a system
// call. It hides the clock's zero, which align determines once.
func Now() int64 { return clock.offset + int64(time.Since(clock.base)) }

var clock = align()

type alignment struct {
	base   time.Time
	offset int64 // CLOCK_MONOTONIC at base
}

// align reads both clocks several times and uses the fastest pair, because the thread may lose its
// CPU between two readings.
func align() alignment {
	var best alignment
	least := time.Duration(1<<63 - 1)
	for range 4 {
		var ts unix.Timespec
		base := time.Now()
		if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
			return alignment{base: base} // every kernel has the clock; otherwise times could still be compared within this process
		}
		if took := time.Since(base); took < least {
			least, best = took, alignment{base: base, offset: ts.Nano() - int64(took)/2}
		}
	}
	return best
}
