package links

import (
	"fmt"
	"net/netip"
	"sync"
	"time"
)

// LookAge is how long what was found by a look at all routes, or at all rules of firewalls, counts for who asks often. There may be very many.
const LookAge = time.Minute

// Overlaps is CheckOverlap for who asks often: that there is no overlap is kept for LookAge, that there is one never, so that who mends it need not wait. The zero
// value may be used, concurrently.
type Overlaps struct {
	lock  sync.Mutex           // of none
	none  map[string]time.Time // of which question that was the answer, and when
	check func(subnets []netip.Prefix, bridge string) error
}

// Check is CheckOverlap.
func (o *Overlaps) Check(subnets []netip.Prefix, bridge string) error {
	question := fmt.Sprint(bridge, subnets)
	if o.knows(question) {
		return nil
	}
	check := o.check
	if check == nil {
		check = CheckOverlap
	}
	asked := time.Now()
	err := check(subnets, bridge)
	if err == nil {
		o.keep(question, asked)
	}
	return err
}

// Forget has the next Check look, whatever was found.
func (o *Overlaps) Forget() {
	o.lock.Lock()
	defer o.lock.Unlock()
	clear(o.none)
}

func (o *Overlaps) knows(question string) bool {
	o.lock.Lock()
	defer o.lock.Unlock()
	at, ok := o.none[question]
	return ok && time.Since(at) < LookAge
}

func (o *Overlaps) keep(question string, at time.Time) {
	o.lock.Lock()
	defer o.lock.Unlock()
	if o.none == nil {
		o.none = map[string]time.Time{}
	}
	for other, at := range o.none {
		if time.Since(at) >= LookAge {
			delete(o.none, other)
		}
	}
	o.none[question] = at
}
