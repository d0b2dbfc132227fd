package state

import (
	"context"
	"errors"
	"sync"
	"testing"

	"berth/internal/testutil"
)

// The reader gets the items of all writers, each writer's in order.
func TestQueuePassesEverythingInOrder(t *testing.T) {
	t.Parallel()
	const writers, each = 4, 1000
	q := NewQueue[[2]int]()
	var writing sync.WaitGroup
	for w := range writers {
		writing.Go(func() {
			for n := range each {
				q.Put(func() [2]int { return [2]int{w, n} })
			}
		})
	}
	defer writing.Wait()
	var next [writers]int
	for total := 0; total < writers*each; {
		items, err := q.Next(t.Context())
		testutil.Must(t, err)
		for _, item := range items {
			if item[1] != next[item[0]] {
				t.Fatalf("writer %d: got %d, want %d", item[0], item[1], next[item[0]])
			}
			next[item[0]]++
		}
		total += len(items)
	}
}

func TestNextEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := NewQueue[int]().Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
