package fair

import (
	"context"
	"errors"
	"sync"
	"testing"
)

// A owner gets no more slots than it leaves, whatever the number; all of them come back.
func TestSlotsLeaveRoomForOtherOwners(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for most, want := range map[int][]int{1: {1, 0}, 2: {1, 1, 0}, 3: {2, 1, 0}, 8: {4, 2, 1, 1, 0}, 64: {32, 16, 8, 4, 2, 1, 1, 0}} {
		slots := NewSlots(most)
		var back []func()
		for i, n := range want {
			owner := string(rune('a' + i))
			for range n {
				release, err := slots.Acquire(t.Context(), owner)
				if err != nil {
					t.Fatal(err)
				}
				back = append(back, release)
			}
			if _, err := slots.Acquire(gone, owner); !errors.Is(err, context.Canceled) {
				t.Errorf("of %d slots owner %d has more than %d: %v", most, i, n, err)
			}
		}
		var waiting sync.WaitGroup
		for range 10 {
			waiting.Go(func() {
				release, err := slots.Acquire(t.Context(), "a")
				if err != nil {
					t.Error(err)
					return
				}
				release()
			})
		}
		for _, release := range back {
			release()
		}
		waiting.Wait()
		slots.mu.Lock()
		if slots.free != most || len(slots.by) != 0 {
			t.Errorf("%d of %d slots have come back; %v", slots.free, most, slots.by)
		}
		slots.mu.Unlock()
	}
}
