package roots

import (
	"errors"
	"testing"

	"berth/internal/projectquota"
)

// Two layers never have the same project, and one that was used lately is not used again soon.
func TestProjectsAreUnique(t *testing.T) {
	q := &Quotas{first: 1000, next: Projects - 2, used: map[uint32]bool{}}
	q.Keep(1000)
	last := uint32(1000 + Projects - 1)
	for i, want := range []uint32{last - 1, last, 1001, 1002} {
		if got := q.reserve(); got != want {
			t.Errorf("project %d is %d, want %d", i, got, want)
		}
	}
	q.Release(1001)
	if got := q.reserve(); got != 1003 {
		t.Errorf("got %d", got)
	}
}

// A filesystem without quotas is no reason not to start, unless a limit is asked for.
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
	if _, err := OpenQuotas("/proc", 1, 1000); !errors.Is(err, projectquota.ErrUnsupported) {
		t.Errorf("with a limit: %v", err)
	}
}
