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
	lock    sync.Mutex           // of what follows
	none    map[string]time.Time // of which question that was the answer, and when
	forgets int
	check   func(subnets []netip.Prefix, bridge string) error
}

// Check is CheckOverlap.
func (o *Overlaps) Check(subnets []netip.Prefix, bridge string) error {
	question := fmt.Sprint(bridge, subnets)
	known, forgets := o.knows(question)
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

// Forget has the next Check look, whatever was found, or is by a look that is under way.
func (o *Overlaps) Forget() {
	o.lock.Lock()
	defer o.lock.Unlock()
	o.forgets++
	clear(o.none)
}

// knows tells whether there is none, and how often that was forgotten.
func (o *Overlaps) knows(question string) (none bool, forgets int) {
	o.lock.Lock()
	defer o.lock.Unlock()
	at, ok := o.none[question]
	return ok && time.Since(at) < LookAge, o.forgets
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
		if time.Since(at) >= LookAge {
			delete(o.none, other)
		}
	}
	o.none[question] = at
}
