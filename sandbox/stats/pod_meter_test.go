package stats

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"berth/internal/cgstats"
	"berth/internal/netns"
	"berth/internal/testutil"
)

// The pause process of a sandboxed runtime is in the node's network namespace, not in the pod's.
func TestNetworkOfPinnedNamespace(t *testing.T) {
	if os.Geteuid() != 0 || os.Getenv("BERTH_MACHINE") == "" {
		t.Skip("needs contrib/machine to make a network namespace")
	}
	netnsPath := t.TempDir() + "/ns"
	testutil.Must(t, netns.New(netnsPath))
	if err := netns.In(netnsPath, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "net1"}, PeerName: defaultInterface})
	}); err != nil {
		t.Fatal(err)
	}
	pod := Cgroups{}.PodMeter("/p", true, netnsPath)
	found, err := pod.net.Read()
	if names := interfaceNames(defaultFirst(found)); err != nil || len(names) != 2 || names[0] != defaultInterface || names[1] != "net1" {
		t.Errorf("interfaces %v, %v", names, err)
	}
	testutil.Must(t, errors.Join(pod.Close(), netns.Remove(netnsPath)))
	stopped := Cgroups{}.PodMeter("/p", true, netnsPath)
	if _, err := stopped.net.Read(); !errors.Is(err, cgstats.ErrGone) {
		t.Errorf("without the namespace: %v", err)
	}
	testutil.Must(t, stopped.Close())
}

// fakeContainer returns a meter of a fake cgroup v2 directory. spend adds CPU time in microseconds.
func fakeContainer(t *testing.T) (c *ContainerMeter, spend func(uint64)) {
	t.Helper()
	dir, used := t.TempDir(), uint64(0)
	spend = func(more uint64) {
		used += more
		testutil.Must(t, os.WriteFile(filepath.Join(dir, "cpu.stat"), fmt.Appendf(nil, "usage_usec %d\nuser_usec %d\nsystem_usec 0\n", used, used), 0o600))
	}
	spend(0)
	c = &ContainerMeter{reader: cgstats.New(func() (cgstats.Group, error) {
		return cgstats.Group{V2: true, Dir: func(string) string { return dir }}, nil
	}, false)}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c, spend
}

// The counters of a pod without a cgroup include ended containers and never decrease.
func TestUsageOfEndedContainersIsKept(t *testing.T) {
	t.Parallel()
	t.Run("cgroup there", func(t *testing.T) { testUsageIsKept(t, false) })
	t.Run("cgroup gone", func(t *testing.T) { testUsageIsKept(t, true) })
}

func testUsageIsKept(t *testing.T, gone bool) {
	pod := Cgroups{}.PodMeter("/p", false, "")
	pause, _ := fakeContainer(t)
	pod.pause = pause
	ending, spendEnding := fakeContainer(t)
	staying, spendStaying := fakeContainer(t)
	spendEnding(500)
	spendStaying(20)
	used := func(past *cgstats.Sample, running ...*ContainerMeter) uint64 {
		t.Helper()
		var usages []*Usage
		for _, c := range running {
			u := &Usage{}
			testutil.Must(t, c.Read(u))
			usages = append(usages, u)
		}
		var u Usage
		if _, err := pod.Read(&u, past, slices.Values(usages)); err != nil {
			t.Fatal(err)
		}
		if u.CPU.User != u.CPU.Usage {
			t.Errorf("user time %d, all %d", u.CPU.User, u.CPU.Usage)
		}
		return u.CPU.Usage / 1000
	}
	check := func(what string, got, want uint64) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %d µs, want %d", what, got, want)
		}
	}
	check("both run", used(pod.Past(), ending, staying), 520)
	check("between running and ended", used(pod.Past(), staying), 520)
	before := pod.Past()
	if gone {
		removeGroup(t, ending)
	}
	testutil.Must(t, pod.Ended(ending))
	if !gone {
		check("measured since before the end", used(before, ending, staying), 520)
	}
	check("after the end", used(pod.Past(), staying), 520)
	spendStaying(7)
	check("the other continues", used(pod.Past(), staying), 527)
}

// removeGroup makes a meter fail as if its cgroup were removed.
func removeGroup(t *testing.T, c *ContainerMeter) {
	t.Helper()
	testutil.Must(t, c.Close())
	c.reader = cgstats.New(func() (cgstats.Group, error) { return cgstats.Group{}, cgstats.ErrGone }, false)
}
