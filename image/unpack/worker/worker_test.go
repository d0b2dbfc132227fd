package worker

import (
	"testing"

	"berth/image/unpack"
)

// The memory limit of a process follows from the limits of its layer.
func TestHeapFor(t *testing.T) {
	least, small := unpack.Limits{Memory: 2 << 20, Window: 8 << 20}, unpack.Limits{Memory: 16 << 20, Window: 8 << 20}
	window, usual := unpack.Limits{Memory: 2 << 20, Window: 128 << 20}, unpack.DefaultLimits
	for name, c := range map[string]struct {
		job        unpack.Job
		pack       bool
		heap, most int64 // MiB
	}{
		"to unpack with no limits":  {unpack.Job{Limits: usual}, false, 232, 592},
		"to unpack with little":     {unpack.Job{Limits: least}, false, 19, 166},
		"to pack with no limits":    {unpack.Job{Limits: usual}, true, 256, 640},
		"to pack with a small tree": {unpack.Job{Limits: small}, true, 40, 208},
		"to pack with a window":     {unpack.Job{Limits: window}, true, 139, 406},
	} {
		t.Run(name, func(t *testing.T) {
			if heap, most := HeapFor(c.job, c.pack), MemoryFor(c.job, c.pack); heap != c.heap<<20 || most != c.most<<20 {
				t.Errorf("%d and %d MiB, want %d and %d", heap>>20, most>>20, c.heap, c.most)
			}
		})
	}
}
