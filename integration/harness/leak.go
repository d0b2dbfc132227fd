package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"berth/integration/inventory"
	"berth/integration/machine"
	"berth/server/admin"
)

// NoLeaks fails the test if the daemon, after the removal of its pods and images, holds more than
// it did at its start. It first removes the layers that the daemon has kept of failed pulls: files
// that the daemon does not know are leaked. It repeats the check, because some resources are
// released a moment after the call (processes are reaped, connections close).
func (d *Daemon) NoLeaks(t *testing.T) {
	t.Helper()
	d.RemovePartial(t)
	if !d.leaks(t, d.Empty, func() inventory.Items { return d.Snapshot(t) }) {
		Must(t, d.Cmd.Process.Signal(syscall.SIGUSR1)) // writes its goroutines to the log
	}
}

// RemovePartial removes what the daemon keeps of failed pulls. Older versions keep nothing.
func (d *Daemon) RemovePartial(t *testing.T) {
	t.Helper()
	conn := Get(grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	err := conn.Invoke(context.Background(), admin.RemovePartialMethod, &wrapperspb.BytesValue{}, &wrapperspb.BytesValue{})
	if status.Code(err) != codes.Unimplemented {
		Must(t, err)
	}
	Must(t, conn.Close())
}

// NoMachineLeaks fails the test if the machine holds more than before the daemon's start.
func NoMachineLeaks(t *testing.T, before inventory.Items, d *Daemon) {
	t.Helper()
	d.leaks(t, before, func() inventory.Items { return MachineSnapshot(d) })
}

// leakPatience is the time limit of the leak check. An idle connection to a trace collector closes
// after 10 s. A process of sessions whose sockets the test has removed waits one minute for the
// clients of unused URLs.
const leakPatience = 80 * time.Second

func (d *Daemon) leaks(t *testing.T, before inventory.Items, now func() inventory.Items) (none bool) {
	t.Helper()
	Registry.DropIdle()
	d.EndSessions(t)
	err := WaitUpTo(leakPatience, func() error {
		if diff := now().Grown(before); len(diff) > 0 {
			return fmt.Errorf("%s", strings.Join(inventory.Summary(diff), "\n  "))
		}
		return nil
	})
	if err != nil {
		t.Errorf("leaked:\n  %v", err)
	}
	return err == nil
}

// Snapshot takes an inventory of the machine and the daemon.
func (d *Daemon) Snapshot(t *testing.T) inventory.Items {
	t.Helper()
	s := inventory.OfDaemon(t, podCgroups(), d.inventoried(), d.Cmd.Process.Pid)
	for range d.Goroutines(t) {
		s.Add("goroutine of the daemon", "any")
	}
	return s
}

// MachineSnapshot takes an inventory of the machine without the daemon's process. d may be nil.
func MachineSnapshot(d *Daemon) inventory.Items {
	return inventory.OfMachine(podCgroups(), d.inventoried())
}

// inventoried returns the daemon's directories and objects for the inventory; nil without a daemon.
func (d *Daemon) inventoried() *inventory.Daemon {
	if d == nil {
		return nil
	}
	return &inventory.Daemon{Root: d.Root, State: d.State, Logs: d.LogDir, Addresses: d.DataDir, Objects: d.Objects}
}

// WatchGrowth takes an inventory of the daemon and the machine. grown takes a second one and
// returns the additions. Both are repeated, because some things end a moment after the call that
// ends them.
func (d *Daemon) WatchGrowth(t *testing.T) (grown func(t *testing.T) []string) {
	t.Helper()
	d.WaitWatched(t)
	before := d.settled(t)
	return func(t *testing.T) (diff []string) {
		t.Helper()
		d.RemovePartial(t)
		d.EndSessions(t)
		_ = WaitUpTo(leakPatience, func() error {
			if diff = d.Snapshot(t).Grown(before); len(diff) > 0 {
				return fmt.Errorf("%d differences", len(diff))
			}
			return nil
		})
		return inventory.Summary(diff)
	}
}

// settled takes snapshots until two consecutive ones are equal.
func (d *Daemon) settled(t *testing.T) inventory.Items {
	t.Helper()
	last := d.Snapshot(t)
	_ = WaitUpTo(leakPatience, func() error {
		before := last
		last = d.Snapshot(t)
		if len(before.Grown(last))+len(last.Grown(before)) > 0 {
			return fmt.Errorf("the snapshot changes")
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

// Heap contains memory statistics of the daemon, in bytes.
type Heap struct{ InUse, Collections, Taken, Limit uint64 }

// Heap reads the statistics from the daemon.
func (d *Daemon) Heap(t *testing.T) (heap Heap) {
	t.Helper()
	status := Get(d.Cri.Status(context.Background(), true))(t)
	Must(t, json.Unmarshal([]byte(status.Info["heap"]), &heap))
	return heap
}

// HeapInUse returns the bytes of the daemon's heap in use, without garbage. Answers to verbose
// Status create garbage, so the polls trigger collections. HeapInUse returns the minimum over
// several collections, because temporary objects count as in use.
func (d *Daemon) HeapInUse(t *testing.T) (bytes uint64) {
	t.Helper()
	const emptiesPools, looks = 3, 6 // collections; the first may be in progress, and pooled objects survive one more
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

// PodCount returns how many configurations of pods and containers were created.
func (d *Daemon) PodCount() int { return int(d.pods.Load()) }

// Goroutines returns the daemon's number of goroutines.
func (d *Daemon) Goroutines(t *testing.T) int {
	t.Helper()
	status := Get(d.Cri.Status(context.Background(), true))(t)
	n, err := strconv.Atoi(status.Info["goroutines"])
	if err != nil {
		t.Fatalf("verbose Status has no number of goroutines: info is %v", status.Info)
	}
	return n
}

// noDenials fails the test for each of SELinux's denials that the test does not tolerate. It logs
// the others.
func (d *Daemon) noDenials(t *testing.T, denials []string) {
	t.Helper()
	for _, denial := range denials {
		if slices.ContainsFunc(d.tolerated, func(part string) bool { return strings.Contains(denial, part) }) {
			t.Logf("SELinux, expected: %s", denial)
		} else {
			t.Errorf("SELinux: %s", denial)
		}
	}
}
