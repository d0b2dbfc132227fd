package state

import "time"

// CreationAfter returns the time of creation for what comes after others that were created at these times: now, by the wall clock, or the
// moment after the last of them. kubelet takes the pod or container that was created last for the current one. So each
// has to be created after those before it, also where the clock was set back between them.
func CreationAfter(now time.Time, before []time.Time) time.Time {
	now = now.Round(0) // records have no monotonic reading either
	for _, t := range before {
		if !now.After(t) {
			now = t.Round(0).Add(1)
		}
	}
	return now
}
