package worker

import (
	"testing"

	"berth/image/unpack"
)

// Only what has a tree in memory is bounded by the memory that this may take.
func TestHeapFor(t *testing.T) {
	small, usual := unpack.Limits{Memory: 16 << 20}, unpack.DefaultLimits
	for name, c := range map[string]struct {
		job  unpack.Job
		pack bool
		want int64 // MiB
	}{
		"to unpack":                         {unpack.Job{Limits: usual}, false, 256},
		"to unpack in a small cgroup":       {unpack.Job{Limits: small}, false, 256},
		"to pack":                           {unpack.Job{Limits: usual}, true, 256},
		"to pack in a small cgroup":         {unpack.Job{Limits: small}, true, 32},
		"what was packed in a small cgroup": {unpack.Job{Limits: small, Packed: true}, false, 32},
	} {
		if got := HeapFor(c.job, c.pack); got != c.want<<20 {
			t.Errorf("%s: %d bytes, want %d MiB", name, got, c.want)
		}
	}
}
