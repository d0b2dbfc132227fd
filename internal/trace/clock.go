package trace

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is CLOCK_MONOTONIC in nanoseconds. Package time reads that clock without a system call, but does not tell its zero, which is found out
// once.
func Now() int64 { return clock.offset + int64(time.Since(clock.base)) }

var clock = align()

type alignment struct {
	base   time.Time
	offset int64 // CLOCK_MONOTONIC at base
}

// align reads both clocks several times and believes the quickest: this thread may lose its CPU between two readings.
func align() alignment {
	var best alignment
	least := time.Duration(1<<63 - 1)
	for range 4 {
		var ts unix.Timespec
		base := time.Now()
		if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
			return alignment{base: base} // no kernel lacks it; times of this process still compare
		}
		if took := time.Since(base); took < least {
			least, best = took, alignment{base: base, offset: ts.Nano() - int64(took)/2}
		}
	}
	return best
}
