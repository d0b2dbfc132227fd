package links

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A list that changes while the kernel gives it out is asked for again, but not for ever.
func TestDump(t *testing.T) {
	for _, c := range []struct {
		interrupted, asked int
		then, want         error
	}{
		{0, 1, nil, nil},
		{0, 1, unix.EPERM, unix.EPERM},
		{dumpAttempts - 1, dumpAttempts, nil, nil},
		{dumpAttempts, dumpAttempts, nil, netlink.ErrDumpInterrupted},
	} {
		t.Run(fmt.Sprintf("%d interrupted, then %v", c.interrupted, c.then), func(t *testing.T) {
			asked := 0
			all, err := dump(func() ([]int, error) {
				if asked++; asked <= c.interrupted {
					return []int{0}, netlink.ErrDumpInterrupted
				}
				return []int{1}, c.then
			})
			if !errors.Is(err, c.want) || asked != c.asked || err == nil && (len(all) != 1 || all[0] != 1) {
				t.Errorf("after %d interruptions: %v, %v, asked %d times", c.interrupted, all, err, asked)
			}
		})
	}
}
