package layer

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
)

// A key has one owner at a time. A waiter becomes owner or gives up. Unused keys are deleted.
func TestTableHasOneOwnerPerKey(t *testing.T) {
	table, key := newTable[int](), digest.FromString("x")
	var wg sync.WaitGroup
	owners := 0 // guarded by the key
	for range 8 {
		wg.Go(func() {
			for n := range 50 {
				o, err := table.Acquire(t.Context(), key)
				if err != nil {
					t.Error(err)
					return
				}
				if owners++; owners != 1 || o.Key() != key {
					t.Errorf("%d owners of %s", owners, o.Key())
				}
				o.Set(&n)
				if o.Value() != &n || table.Get(key) != &n || len(table.All()) != 1 {
					t.Error("what was set is not seen")
				}
				o.Set(nil)
				owners--
				o.Release()
			}
		})
	}
	wg.Wait()
	if len(table.items) > 0 || table.Get(key) != nil {
		t.Errorf("%d keys are left", len(table.items))
	}
	v := 1
	table.Add(key, &v)
	o, err := table.Acquire(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := table.Acquire(gone, key); !errors.Is(err, context.Canceled) {
		t.Errorf("a second owner: %v", err)
	}
	o.Release()
	if table.Get(key) != &v {
		t.Error("a thing that was not changed is gone")
	}
}
