package links

import (
	"fmt"
	"net/netip"
	"sync"
	"time"
)

// CacheTime is how long Overlaps caches a result. A check is slow on a node with many routes.
const CacheTime = time.Minute

// Overlaps caches CheckOverlap for frequent callers. It caches only success, so it detects a
// repaired node at once. The zero value is ready for use, and methods may be called concurrently.
type Overlaps struct {
	check func(subnets []netip.Prefix, bridge string) error // nil: CheckOverlap. Constant

	lock sync.Mutex
	// +checklocks:lock
	none map[string]time.Time // time of the last success, by arguments
	// +checklocks:lock
	forgets int
}

// Check is CheckOverlap with the cache.
func (o *Overlaps) Check(subnets []netip.Prefix, bridge string) error {
	question := fmt.Sprint(bridge, subnets)
	known, forgets := o.cached(question)
	if known {
		return nil
	}
	check := o.check
	if check == nil {
		check = CheckOverlap
	}
	asked := time.Now()
	err := check(subnets, bridge)
	if err == nil {
		o.keep(question, asked, forgets)
	}
	return err
}

// Forget drops all cached results, including the result of a check in progress.
func (o *Overlaps) Forget() {
	o.lock.Lock()
	defer o.lock.Unlock()
	o.forgets++
	clear(o.none)
}

// cached reports whether success is cached, and the number of Forget calls.
func (o *Overlaps) cached(question string) (none bool, forgets int) {
	o.lock.Lock()
	defer o.lock.Unlock()
	at, ok := o.none[question]
	return ok && time.Since(at) < CacheTime, o.forgets
}

func (o *Overlaps) keep(question string, at time.Time, forgets int) {
	o.lock.Lock()
	defer o.lock.Unlock()
	if forgets != o.forgets {
		return
	}
	if o.none == nil {
		o.none = map[string]time.Time{}
	}
	for other, at := range o.none {
		if time.Since(at) >= CacheTime {
			delete(o.none, other)
		}
	}
	o.none[question] = at
}
