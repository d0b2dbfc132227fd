package links

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// dumpAttempts is how often a list is asked for that changes while the kernel gives it out.
const dumpAttempts = 10

// dump asks for a list of the kernel's until it comes whole. The kernel gives a long one out in pieces, and says so (NLM_F_DUMP_INTR) where it was changed
// in between, by whatever pod comes or goes; the library returns what it has, with ErrDumpInterrupted, and what is missing in it nobody knows.
func dump[T any](ask func() ([]T, error)) (all []T, err error) {
	for range dumpAttempts {
		if all, err = ask(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}
