package stats

import (
	"sync/atomic"
	"time"
)

// rate computes how much CPU time a second something uses, from the samples that
// all clients together take. A value covers the time since the last sample that is
// at least minWindow old: two clients, one every second and one every ten, both get
// the average of the last one to two seconds; one alone gets that since its own last.
// A window far shorter would tell more about the scheduler's clock than about the
// container. There is no lock; of two samples at the same moment one is forgotten.
type rate struct{ last atomic.Pointer[window] }

// window lies between two samples. It never changes.
type window struct{ from, to cpuSample }

type cpuSample struct {
	at    time.Time
	usage uint64
}

const (
	// minWindow lies between two samples that are remembered.
	minWindow = time.Second
	// minFirst must lie between the first two for a value. The CPU time of what runs is
	// brought up to date with the clock tick, every 4 or 10 ms.
	minFirst = 100 * time.Millisecond
)

// add takes a sample and returns the value, if one is known: that takes two samples,
// with the first usage not higher than the second.
func (r *rate) add(at time.Time, usage uint64) (nanoCores uint64, known bool) {
	now := cpuSample{at, usage}
	last := r.last.Load()
	if last != nil && at.Before(last.to.at) { // one that was taken later came first
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

// rateSince is not known without an earlier sample.
func (s cpuSample) rateSince(from cpuSample) (nanoCores uint64, known bool) {
	elapsed := s.at.Sub(from.at)
	if from.at.IsZero() || elapsed < minFirst || s.usage < from.usage {
		return 0, false
	}
	return uint64(float64(s.usage-from.usage) / float64(elapsed) * float64(time.Second)), true
}
