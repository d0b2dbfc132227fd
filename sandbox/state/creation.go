package state

import "time"

// CreationAfter returns a creation time that is later than all times in before, even if the clock
// was set back. kubelet treats the newest pod or container as the current one.
func CreationAfter(now time.Time, before []time.Time) time.Time {
	now = now.Round(0) // times in records have no monotonic reading either
	for _, t := range before {
		if !now.After(t) {
			now = t.Round(0).Add(1)
		}
	}
	return now
}
