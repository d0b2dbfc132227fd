package harness

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"berth/integration/inventory"
)

// FullState takes a complete inventory of the daemon's pods, containers, images and security
// profiles, on the machine and in the daemon's lists. It replaces values that differ between two
// runs of the same requests, and leaves out the daemon's goroutines.
func (d *Daemon) FullState(t *testing.T) inventory.Items {
	t.Helper()
	Registry.DropIdle()
	s := inventory.Everything(t, podCgroups(), d.inventoried(), d.Cmd.Process.Pid)
	d.addLists(t, s)
	return s
}

// Settled waits until the state no longer changes and the launchers are ready, and returns the
// state.
func (d *Daemon) Settled(t *testing.T) inventory.Items {
	t.Helper()
	d.WaitIdle(t)
	last := d.FullState(t)
	Eventually(t, "the state no longer changes", func() error {
		time.Sleep(30 * time.Millisecond) // between two inventories
		now := d.FullState(t)
		diff := now.Differences(last)
		if last = now; len(diff) > 0 {
			return fmt.Errorf("%s", strings.Join(inventory.Summary(diff), "\n  "))
		}
		return nil
	})
	return last
}

// Becomes waits until the state equals want. It returns the remaining differences.
func (d *Daemon) Becomes(t *testing.T, want inventory.Items) (differences []string) {
	t.Helper()
	return d.BecomesWithin(t, want, leakPatience)
}

// BecomesWithin is Becomes with another time limit.
func (d *Daemon) BecomesWithin(t *testing.T, want inventory.Items, limit time.Duration) (differences []string) {
	t.Helper()
	_ = PollUpTo(limit, 100*time.Millisecond, func() error {
		if differences = d.FullState(t).Differences(want); len(differences) > 0 {
			return fmt.Errorf("there are %d differences", len(differences))
		}
		return nil
	})
	return differences
}

// addLists adds the daemon's CRI status of each of its objects.
func (d *Daemon) addLists(t *testing.T, s inventory.Items) {
	t.Helper()
	ctx := context.Background() // also works after the test's context is cancelled
	pods, err := d.Cri.ListPodSandbox(ctx, nil)
	Must(t, err)
	for _, p := range pods {
		Must(t, s.AddMessage("listed pod", p))
		if status, err := d.Cri.PodSandboxStatus(ctx, p.Id, false); err == nil { // otherwise the pod was removed meanwhile
			Must(t, s.AddMessage("status of pod", status.Status))
		}
	}
	containers, err := d.Cri.ListContainers(ctx, nil)
	Must(t, err)
	for _, c := range containers {
		Must(t, s.AddMessage("listed container", c))
		if status, err := d.Cri.ContainerStatus(ctx, c.Id, false); err == nil {
			Must(t, s.AddMessage("status of container", status.Status))
		}
	}
	images := Get(d.Images.ListImages(ctx, nil))(t)
	for _, i := range images {
		Must(t, s.AddMessage("listed image", i))
	}
	for _, p := range Get(d.Images.ListSecurityProfiles(ctx))(t) {
		Must(t, s.AddMessage("listed security profile", p))
	}
	usage := Get(d.Images.ImageFsInfo(ctx))(t)
	for _, u := range usage.ImageFilesystems {
		Must(t, s.AddMessage("usage of images", u))
	}
}
