package state

import "time"

// CreationAfter returns a creation time later than all of before: now, or the moment after the
// latest one. kubelet takes the newest pod or container for the current one, so each is created
// after the earlier ones, even if the clock was set back.
func CreationAfter(now time.Time, before []time.Time) time.Time {
	now = now.Round(0) // records have no monotonic reading either
	for _, t := range before {
		if !now.After(t) {
			now = t.Round(0).Add(1)
		}
	}
	return now
}
