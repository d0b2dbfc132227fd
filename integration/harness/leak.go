package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"berth/integration/inventory"
	"berth/integration/machine"
)

// NoLeaks fails the test if the daemon, with its pods and images removed, holds
// more than it did when it was new. Some things end a moment after the call that
// asks for it (processes are reaped, connections close), so the check is repeated.
func (d *Daemon) NoLeaks(t *testing.T) {
	t.Helper()
	d.leaks(t, d.Empty, func() inventory.Items { return d.Snapshot(t) })
}

// NoMachineLeaks fails the test if the machine holds more than before the daemon.
func NoMachineLeaks(t *testing.T, before inventory.Items, d *Daemon) {
	t.Helper()
	d.leaks(t, before, func() inventory.Items { return MachineSnapshot(d) })
}

// leakPatience is how long things may take to go away after the last call. The longest is a connection to a collector of traces, which is
// closed when it was idle for 10 s: in a guest with one processor, beside other work, 15 s in all were too short.
const leakPatience = 25 * time.Second

func (d *Daemon) leaks(t *testing.T, before inventory.Items, now func() inventory.Items) {
	t.Helper()
	Registry.DropIdle()
	err := WaitUpTo(leakPatience, func() error {
		if diff := now().Grown(before); len(diff) > 0 {
			return fmt.Errorf("%s", strings.Join(inventory.Summary(diff), "\n  "))
		}
		return nil
	})
	if err != nil {
		t.Errorf("left behind:\n  %v", err)
	}
}

// Snapshot takes everything the machine and the daemon hold.
func (d *Daemon) Snapshot(t *testing.T) inventory.Items {
	t.Helper()
	s := inventory.OfDaemon(t, podCgroups(), d.belongings(), d.Cmd.Process.Pid)
	for range d.Goroutines(t) {
		s.Add("goroutine of the daemon", "any")
	}
	return s
}

// MachineSnapshot takes what exists outside of any daemon. d may be nil.
func MachineSnapshot(d *Daemon) inventory.Items {
	return inventory.OfMachine(podCgroups(), d.belongings())
}

// belongings is where to look for what is the daemon's; nil for none.
func (d *Daemon) belongings() *inventory.Daemon {
	if d == nil {
		return nil
	}
	return &inventory.Daemon{Root: d.Root, State: d.State, Logs: d.LogDir, Addresses: d.DataDir, Objects: d.Objects}
}

// Held takes what the daemon and the machine hold, and returns what later tells of everything
// there is more of. Some things end a moment after the call that asks for it, so both looks
// are repeated.
func (d *Daemon) Held(t *testing.T) (grown func(t *testing.T) []string) {
	t.Helper()
	d.WaitWatched(t)
	before := d.settled(t)
	return func(t *testing.T) (diff []string) {
		t.Helper()
		_ = WaitUpTo(leakPatience, func() error {
			if diff = d.Snapshot(t).Grown(before); len(diff) > 0 {
				return fmt.Errorf("%d differences", len(diff))
			}
			return nil
		})
		return inventory.Summary(diff)
	}
}

// settled takes snapshots until two, one after the other, are the same.
func (d *Daemon) settled(t *testing.T) inventory.Items {
	t.Helper()
	last := d.Snapshot(t)
	_ = WaitUpTo(leakPatience, func() error {
		before := last
		last = d.Snapshot(t)
		if len(before.Grown(last))+len(last.Grown(before)) > 0 {
			return fmt.Errorf("it changes")
		}
		return nil
	})
	return last
}

// Memory returns the daemon's resident memory, in kB.
func (d *Daemon) Memory(t *testing.T) (kilobytes int) {
	t.Helper()
	_, err := fmt.Sscan(machine.StatusField(t, d.Cmd.Process.Pid, "VmRSS"), &kilobytes)
	Must(t, err)
	return kilobytes
}

// Heap is what the daemon says of its memory, in bytes.
type Heap struct{ InUse, Collections, Taken, Limit uint64 }

// Heap asks the daemon for it.
func (d *Daemon) Heap(t *testing.T) (heap Heap) {
	t.Helper()
	status, err := d.Cri.Status(context.Background(), true)
	Must(t, err)
	Must(t, json.Unmarshal([]byte(status.Info["heap"]), &heap))
	return heap
}

// HeapInUse returns how many bytes of the daemon's heap are in use, garbage not counted. What is garbage now has been
// collected by then: answers to verbose Status make new garbage, so asking for it drives the collector. What is made while it
// works counts as in use, so it is the least of several collections.
func (d *Daemon) HeapInUse(t *testing.T) (bytes uint64) {
	t.Helper()
	const emptiesPools, looks = 3, 6 // collections; the first may be under way, and what is pooled outlives one more
	first := d.Heap(t).Collections
	bytes = math.MaxUint64
	Eventually(t, "garbage is collected", func() error {
		for range 100 {
			heap := d.Heap(t)
			if heap.Collections >= first+emptiesPools {
				bytes = min(bytes, heap.InUse)
			}
			if heap.Collections >= first+emptiesPools+looks {
				return nil
			}
		}
		return fmt.Errorf("not %d times", emptiesPools+looks)
	})
	return bytes
}

// PodCount is how many configurations of pods and containers were made.
func (d *Daemon) PodCount() int { return int(d.pods.Load()) }

// Goroutines asks the daemon how many it has.
func (d *Daemon) Goroutines(t *testing.T) int {
	t.Helper()
	status, err := d.Cri.Status(context.Background(), true)
	Must(t, err)
	n, err := strconv.Atoi(status.Info["goroutines"])
	if err != nil {
		t.Fatalf("verbose Status does not tell the number of goroutines: info is %v", status.Info)
	}
	return n
}
