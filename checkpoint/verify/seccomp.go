package verify

import (
	"bytes"
	"fmt"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
)

// filter is a seccomp filter of the images.
type filter struct {
	program []byte
	prev    int // index of the filter that was loaded before; -1: none
	tsync   bool
}

// hasFilter reports whether the chain of filters that ends with index last begins with program, and
// whether all have the flag for all threads (SECCOMP_FILTER_FLAG_TSYNC).
func hasFilter(filters []filter, last int, program []byte) (has, tsync bool) {
	tsync = true
	for steps := 0; last >= 0 && last < len(filters) && steps <= len(filters); steps++ {
		f := filters[last]
		tsync = tsync && f.tsync
		if f.prev < 0 {
			return bytes.Equal(f.program, program), tsync
		}
		last = f.prev
	}
	return false, false
}

// readFilters reads the filters of all threads.
func (c *check) readFilters() error {
	entries, err := entriesOf[seccomp.SeccompEntry](c.images, "seccomp.img", "SECCOMP", nil)
	if err != nil {
		return err
	}
	const tsync = 1 // SECCOMP_FILTER_FLAG_TSYNC
	for _, e := range entries {
		for _, f := range e.GetSeccompFilters() {
			prev := -1
			if f.Prev != nil {
				prev = int(f.GetPrev())
			}
			if other := f.GetFlags() &^ tsync; other != 0 {
				// SECCOMP_FILTER_FLAG_LOG only logs more, but the others change what a filter does.
				c.differ("seccomp filter: flags", fmt.Sprintf("%#x", other), "none")
			}
			c.filters = append(c.filters, filter{f.GetFilter(), prev, f.GetFlags()&tsync != 0})
		}
	}
	return nil
}

// checkSeccomp checks that the first filter of a thread is that of the spec. A process may have
// loaded more filters, which can only forbid more. leader is the process's first thread: CRIU
// stores a filter that all threads share only there.
func (c *check) checkSeccomp(thread string, core, leader *criu_core.ThreadCoreEntry) {
	if c.e.Spec.Linux.Seccomp == nil {
		return
	}
	if len(c.e.Seccomp) == 0 {
		c.differ(thread+": seccomp", "a filter", "one that berth could compare")
		return
	}
	if core.GetSeccompMode() == criu_core.SeccompMode_disabled && core != leader {
		if leader.GetSeccompMode() == criu_core.SeccompMode_filter && leader.SeccompFilter != nil {
			if has, tsync := hasFilter(c.filters, int(leader.GetSeccompFilter()), c.e.Seccomp); has && tsync {
				return
			}
		}
		c.differ(thread+": seccomp", "no filter", "the filter of the spec")
		return
	}
	if core.GetSeccompMode() != criu_core.SeccompMode_filter || core.SeccompFilter == nil {
		c.differ(thread+": seccomp", core.GetSeccompMode().String(), "the filter of the spec")
		return
	}
	if has, _ := hasFilter(c.filters, int(core.GetSeccompFilter()), c.e.Seccomp); !has {
		c.differ(thread+": seccomp", "another filter", "the filter of the spec")
	}
}
