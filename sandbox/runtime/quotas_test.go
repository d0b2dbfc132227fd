package runtime

import (
	"errors"
	"testing"

	"berth/internal/diskusage"
)

// No two layers share a project. A recently used ID is not drawn again soon. A container cannot
// guess its neighbour's ID.
func TestProjectsAreUnique(t *testing.T) {
	const first = 1000
	q := &Quotas{first: first, used: map[uint32]bool{}}
	given, near := make([]uint32, maxDrawn), 0
	seen := map[uint32]bool{}
	for i := range given {
		given[i] = q.reserve()
		if given[i] < first || given[i] >= first+projects || seen[given[i]] {
			t.Fatalf("project %d is %d", i, given[i])
		}
		seen[given[i]] = true
		if i > 0 && max(given[i], given[i-1])-min(given[i], given[i-1]) < 1000 {
			near++
		}
	}
	if near > 100 { // 0.1 is the expected value
		t.Errorf("%d of %d projects are close to the previous one", near, len(given))
	}
	var kept uint32
	for _, project := range given {
		if kept == 0 {
			kept = project
			continue
		}
		q.Release(project)
	}
	for i := 1; i < 10 && len(q.drawn) == maxDrawn; i++ {
		if got := q.reserve(); got == kept || !seen[got] {
			t.Errorf("reuse %d: got project %d", i, got)
		}
	}
}

// If all drawn IDs are in use, reserve draws further IDs.
func TestFurtherProjectsWhenAllAreUsed(t *testing.T) {
	q := &Quotas{first: 1000, used: map[uint32]bool{}}
	q.drawn = make([]uint32, maxDrawn)
	for i := range q.drawn {
		q.drawn[i] = 1000 + uint32(i)
		q.Keep(q.drawn[i])
	}
	if got := q.reserve(); got < 1000+maxDrawn {
		t.Errorf("got %d, which is in use", got)
	}
}

// The project of an earlier daemon's container is not reused.
func TestKeptProjectsAreNotReused(t *testing.T) {
	q := &Quotas{first: 1000, used: map[uint32]bool{}}
	q.drawn = make([]uint32, maxDrawn)
	for i := range q.drawn {
		q.drawn[i] = 1000 + uint32(i)
	}
	q.Keep(1000)
	q.Keep(1001)
	if got := q.reserve(); got != 1002 {
		t.Errorf("got %d", got)
	}
}

// A filesystem without quotas is an error only if a limit is configured.
func TestWithoutQuotas(t *testing.T) {
	q, err := OpenQuotas("/proc", 0, 1000)
	if q != nil || err != nil {
		t.Fatalf("%v, %v", q, err)
	}
	q.Keep(7)
	project, err := q.Take()
	if _, ok, useErr := q.Usage(7); project != 0 || ok || errors.Join(err, useErr, q.assign("/nowhere", 7), q.Clear(7), q.Close()) != nil {
		t.Errorf("project %d, %v, %v", project, err, useErr)
	}
	q.Release(7)
	if _, err := OpenQuotas("/proc", 1, 1000); !errors.Is(err, diskusage.ErrNoQuotas) {
		t.Errorf("with a limit: %v", err)
	}
}
