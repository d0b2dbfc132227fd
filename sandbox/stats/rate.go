package stats

import (
	"sync/atomic"
	"time"
)

// rate computes the CPU time per second from the samples of all clients. A value covers the time
// since the last sample that is at least minWindow old. If one client reads every second and
// another every ten seconds, both get the average of the last one to two seconds. A single client
// gets the average since its previous read. A much shorter window would mostly show the scheduler's
// clock tick. rate has no lock. It drops one of two samples taken at the same time.
type rate struct{ last atomic.Pointer[window] }

// window is the time between two samples. It is immutable.
type window struct{ from, to cpuSample }

type cpuSample struct {
	at    time.Time
	usage uint64
}

const (
	// minWindow is the minimum time between two stored samples.
	minWindow = time.Second
	// minFirst is the minimum time between the first two samples. The kernel updates the CPU time
	// of a running process with the clock tick, every 4 or 10 ms.
	minFirst = 100 * time.Millisecond
)

// add takes a sample and returns the current rate. The rate is unknown before the second sample,
// and when the usage has decreased.
func (r *rate) add(at time.Time, usage uint64) (nanoCores uint64, known bool) {
	now := cpuSample{at, usage}
	last := r.last.Load()
	if last != nil && at.Before(last.to.at) { // a later sample overtook this one
		return now.rateSince(last.from)
	}
	if last == nil || usage < last.to.usage {
		r.last.CompareAndSwap(last, &window{to: now})
		return 0, false
	}
	from := last.to
	switch since := at.Sub(last.to.at); {
	case since >= minWindow:
		r.last.CompareAndSwap(last, &window{from: last.to, to: now})
	case !last.from.at.IsZero():
		from = last.from
	case since < minFirst:
		return 0, false
	}
	return now.rateSince(from)
}

// rateSince returns the rate between two samples. If there is no earlier sample, the rate is
// unknown.
func (s cpuSample) rateSince(from cpuSample) (nanoCores uint64, known bool) {
	elapsed := s.at.Sub(from.at)
	if from.at.IsZero() || elapsed < minFirst || s.usage < from.usage {
		return 0, false
	}
	return uint64(float64(s.usage-from.usage) / float64(elapsed) * float64(time.Second)), true
}
