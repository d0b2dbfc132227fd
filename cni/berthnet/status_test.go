package berthnet

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/lockfile"
	"berth/internal/testutil"
)

// status runs STATUS with additional configuration.
func (b *bed) status(with map[string]any) error {
	_, err := (&testPod{bed: b}).call("STATUS", "", with)
	return err
}

// STATUS returns code 50 with the reason if ADD would fail, and changes nothing.
func TestStatusRefuses(t *testing.T) {
	newWorld(t)
	outside, err := netlink.LinkByName("outside")
	testutil.Must(t, err)
	for _, c := range []struct {
		what    string
		conf    map[string]any
		prepare func(t *testing.T)
		want    string
	}{
		{"the bridge of another network with pods", nil, func(t *testing.T) { newBed(t, nil).attached(nil) }, "has 1 pods of network test-"},
		{"a bridge with a foreign alias", nil, func(t *testing.T) {
			testutil.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bn0"}}))
			link, err := netlink.LinkByName("bn0")
			testutil.Must(t, err)
			testutil.Must(t, netlink.LinkSetAlias(link, "foreign"))
		}, `has the alias "foreign"`},
		{"no place for addresses", map[string]any{"dataDir": "/dev/null/x"}, func(*testing.T) {}, "not a directory"},
		{"no subnet", map[string]any{"subnets": []string{}}, func(*testing.T) {}, "neither subnets nor ipRanges"},
		{"something else of the bridge's name", map[string]any{"bridge": "outside"}, func(*testing.T) {}, "outside is not a bridge"},
		{"an address of the node", map[string]any{"subnets": []string{"192.0.2.0/24"}}, func(*testing.T) {}, "192.0.2.1/24"},
		{"a route of the node", nil, func(t *testing.T) {
			_, dst, err := net.ParseCIDR("10.99.0.128/25")
			testutil.Must(t, err)
			route := &netlink.Route{LinkIndex: outside.Attrs().Index, Dst: dst}
			testutil.Must(t, netlink.RouteAdd(route))
			t.Cleanup(func() { testutil.Must(t, netlink.RouteDel(route)) })
		}, "route to 10.99.0.128/25"},
		{"part of another network", nil, func(t *testing.T) {
			newBed(t, map[string]any{"name": "wide", "bridge": "bn1", "subnets": []string{"10.96.0.0/12"}}).attached(nil)
		}, "subnet 10.96.0.0/12 of bridge bn1"},
		{"a gateway of another network", map[string]any{"subnets": []string{"10.96.0.0/12"}}, func(t *testing.T) {
			newBed(t, map[string]any{"name": "narrow", "bridge": "bn1"}).attached(nil)
		}, "10.99.0.1/24 of interface bn1"},
	} {
		t.Run(c.what, func(t *testing.T) {
			b := newBed(t, c.conf)
			c.prepare(t)
			before := bridges(t)
			if err := b.status(nil); codeOf(err) != types.ErrPluginNotAvailable || !strings.Contains(err.Error(), c.want) {
				t.Errorf("STATUS: %v, want %q", err, c.want)
			}
			if after := bridges(t); after != before {
				t.Errorf("STATUS changes %s to %s", before, after)
			}
			if err := b.pod(nil).add(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("ADD: %v, want %q", err, c.want)
			}
			if b.conf["bridge"] == "outside" {
				b.conf["bridge"] = "bn0" // deleted by newWorld
			}
		})
	}
	if err := newBed(t, nil).status(nil); err != nil {
		t.Errorf("STATUS of a network without conflicts: %v", err)
	}
}

// bridges returns the names and aliases of the node's bridges.
func bridges(t *testing.T) string {
	t.Helper()
	all, err := netlink.LinkList()
	testutil.Must(t, err)
	var names []string
	for _, l := range all {
		if l.Type() == "bridge" {
			names = append(names, l.Attrs().Name+" "+l.Attrs().Alias)
		}
	}
	return strings.Join(names, ", ")
}

// STATUS uses the runtime's ranges like ADD. With the capability ipRanges it also accepts that only
// ADD receives them. A network can take a bridge whose network has no pods.
func TestStatusAllows(t *testing.T) {
	newWorld(t)
	b := newBed(t, map[string]any{"subnets": []string{"192.0.2.0/24"}})
	ranges := map[string]any{"runtimeConfig": map[string]any{"ipRanges": []any{[]any{map[string]any{"subnet": subnet4}}}}}
	if err := b.status(ranges); err != nil {
		t.Errorf("with other ranges: %v", err)
	}
	if err := newBed(t, map[string]any{"subnets": []string{}, "capabilities": map[string]bool{"ipRanges": true}}).status(nil); err != nil {
		t.Errorf("without a subnet, which the runtime may pass with each pod: %v", err)
	}
	other := newBed(t, nil)
	left := other.attached(nil)
	testutil.Must(t, left.del())
	testutil.Must(t, links.Cut(left.id, "eth0", true))
	if err := b.status(ranges); err != nil {
		t.Errorf("with another's bridge without pods: %v", err)
	}
	if bridge, err := links.FindBridge("bn0"); err != nil || !bridge.BelongsTo(other.key()) {
		t.Errorf("STATUS has taken the bridge; %v", err)
	}
}

// STATUS tries the rules before the first pod, until a trial succeeds.
func TestStatusWithoutRules(t *testing.T) {
	b := newBed(t, nil)
	tries := 0
	outcome := error(unix.ENOENT)
	status := func(when string, want int) {
		t.Helper()
		tries = 0
		err := b.status(nil)
		if tries != want {
			t.Errorf("%s the rules are tried %d times, want %d", when, tries, want)
		}
		if refused := want > 0 && outcome != nil; refused != (codeOf(err) == types.ErrPluginNotAvailable) || !refused && err != nil {
			t.Errorf("STATUS %s: %v", when, err)
		}
	}
	b.plugin.tryFilter = func(n rules.Network) error {
		tries++
		if n.Bridge != "bn0" || n.Key != b.key() || len(n.Subnets) != 2 {
			t.Errorf("tried is %+v", n)
		}
		return outcome
	}
	status("without a bridge", 1)
	pod := b.attached(nil)
	flushRuleset(t)
	status("with a pod whose rules are gone", 0)
	testutil.Must(t, pod.del())
	testutil.Must(t, links.Cut(pod.id, "eth0", true))
	flushRuleset(t)
	status("with a bridge alone", 1)
	outcome = nil
	status("with a better kernel", 1)
	status("after that", 0)

	seen := newBed(t, nil)
	seen.conf["dataDir"] = b.dir
	seen.plugin.tryFilter = func(rules.Network) error { tries++; return nil }
	testutil.Must(t, seen.status(nil))
	flushRuleset(t)
	testutil.Must(t, seen.status(nil))
	if tries != 0 {
		t.Errorf("another process tries installed rules %d times", tries)
	}
}

func TestTryRules(t *testing.T) {
	b := newBed(t, nil)
	n := rules.Network{Key: b.key(), Bridge: "bn0", Masquerade: true,
		Subnets: []netip.Prefix{netip.MustParsePrefix(subnet4), netip.MustParsePrefix(subnet6)}}
	testutil.Must(t, rules.Try(n))
	if networks, err := b.plugin.filter.Networks(); err != nil || len(networks) != 0 {
		t.Errorf("tables of %v; %v", networks, err)
	}
	n.Key = strings.Repeat("x", 300) // exceeds the limit of a table's name
	if err := rules.Try(n); err == nil || !strings.Contains(err.Error(), n.Key) {
		t.Errorf("rules that no kernel supports: %v", err)
	}
}

// The code is 51 if existing pods may be unreachable.
func TestStatusRestoresExistingPods(t *testing.T) {
	b := newBed(t, nil)
	b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	flushRuleset(t)
	lock := filepath.Join(b.dir, "test", "lock")
	testutil.Must(t, os.Remove(lock))
	testutil.Must(t, os.Symlink("elsewhere", lock))
	if err := b.status(nil); codeOf(err) != types.ErrLimitedConnectivity || !strings.Contains(err.Error(), "lock addresses") {
		t.Errorf("STATUS that cannot write the rules: %v", err)
	}
	testutil.Must(t, os.Remove(lock))
	testutil.Must(t, b.status(nil))
	if open := b.openPorts(); len(open) != 2 {
		t.Errorf("open are %v", open)
	}
}

// The node works again after its directory of addresses and all rules were deleted.
func TestStatusWithoutDirectory(t *testing.T) {
	b := newBed(t, nil)
	testutil.Must(t, b.attached(nil).del())
	flushRuleset(t)
	testutil.Must(t, os.RemoveAll(b.dir))
	testutil.Must(t, b.status(nil))
	testutil.Must(t, b.attached(nil).del())
}

// A node whose addresses cannot be locked is not ready, even if nothing must be written.
func TestStatusWithoutLock(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(nil)
	lock := filepath.Join(b.dir, "test", "lock")
	testutil.Must(t, os.Remove(lock))
	testutil.Must(t, os.Symlink("elsewhere", lock))
	if err := b.status(nil); codeOf(err) != types.ErrPluginNotAvailable || !strings.Contains(err.Error(), lock) {
		t.Errorf("STATUS: %v", err)
	}
	testutil.Must(t, os.Remove(lock))
	testutil.Must(t, b.status(nil))
	testutil.Must(t, pod.del())
}

// A stuck holder of the bridge lock makes the node not ready, because each ADD would fail.
func TestStatusWithLockHeld(t *testing.T) {
	b := newBed(t, nil)
	b.attached(nil)
	unlock, err := links.Lock(t.Context(), lockfile.Exclusive)
	testutil.Must(t, err)
	if err := b.status(nil); codeOf(err) != types.ErrPluginNotAvailable || !strings.Contains(err.Error(), "berth-net.lock") {
		t.Errorf("STATUS: %v", err)
	}
	unlock()
	unlock, err = links.Lock(t.Context(), lockfile.Shared)
	testutil.Must(t, err)
	defer unlock()
	testutil.Must(t, b.status(nil))
}
