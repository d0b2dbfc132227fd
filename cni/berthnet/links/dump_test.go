package links

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// An interrupted list is requested again, a limited number of times.
func TestInterruptedDumpIsRetried(t *testing.T) {
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
