package berthnet

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/lockfile"
	"berth/internal/testutil"
)

// Tests with concurrent or earlier changes of other programs.

// waitsForLock waits until a thread of this process waits for the lock of the bed's addresses,
// which the test holds.
func (b *bed) waitsForLock(t *testing.T) {
	t.Helper()
	waitsFor(t, filepath.Join(b.dir, "test", "lock"))
}

// waitsFor waits until a thread of this process waits for a lock that the test holds.
func waitsFor(t *testing.T, lock string) {
	t.Helper()
	testutil.Eventually(t, "a thread waits for "+lock, func() bool {
		entries, err := os.ReadDir("/proc/self/fd")
		testutil.Must(t, err)
		n := 0
		for _, e := range entries {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && to == lock {
				n++
			}
		}
		return n == 2
	})
}

// othersBridge changes the bridge like an ADD with another subnet, which removes gateways without
// pods.
func (b *bed) othersBridge(t *testing.T) {
	t.Helper()
	_, err := links.MakeBridge(&links.Description{Name: "bn0", Network: b.key(), Gateways: []netip.Prefix{netip.MustParsePrefix("10.98.0.1/24")}})
	testutil.Must(t, err)
}

// An ADD that waits for the lock after it has read its subnet's gateway keeps the gateway.
func TestGatewayStaysForReservedPod(t *testing.T) {
	b := newBed(t, nil)
	testutil.Must(t, b.attached(nil).del())
	unlock, err := b.store().Lock(context.Background())
	testutil.Must(t, err)
	pod := b.pod(nil)
	added := make(chan error, 1)
	go func() { added <- pod.add() }()
	b.waitsForLock(t)
	b.othersBridge(t)
	unlock()
	testutil.Must(t, <-added)
	t.Cleanup(func() { testutil.Must(t, pod.del()) })
	answering(t, pod.netns, "tcp", 80)
	conversation{"node to pod", "", "tcp4", "80", pod.ip(false), "10.99.0.1"}.check(t)
}

// STATUS writes rules for the bridge's current subnets. The subnets may have changed while STATUS
// waited for the lock.
func TestRulesCoverBridgeSubnets(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(nil)
	unlock, err := b.store().Lock(context.Background())
	testutil.Must(t, err)
	flushRuleset(t)
	done := make(chan error, 1)
	go func() {
		_, err := pod.call("STATUS", "", nil)
		done <- err
	}()
	b.waitsForLock(t)
	b.othersBridge(t)
	unlock()
	testutil.Must(t, <-done)
	bridge, err := links.FindBridge("bn0")
	testutil.Must(t, err)
	if installed, err := b.plugin.filter.Installed(b.unattached(t, pod).rules(bridge)); !installed || err != nil {
		t.Errorf("rules of the bridge with %v are installed: %v; %v", bridge.Prefixes, installed, err)
	}
}

// unattached returns the plugin's attachment of a pod before its ADD.
func (b *bed) unattached(t *testing.T, p *testPod) *attachment {
	t.Helper()
	a, err := b.plugin.attachment(&skel.CmdArgs{ContainerID: p.id, Netns: p.netns, IfName: "eth0", StdinData: p.stdin(p.with)}, conf.Parse)
	testutil.Must(t, err)
	testutil.Must(t, a.openStore())
	return a
}

// ADD restores rules that are deleted while it runs, with the host ports of all pods.
func TestFlushedRulesetWhileAdding(t *testing.T) {
	b := newBed(t, nil)
	b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	pod := b.pod(hostPorts(map[string]any{"hostPort": 8081, "containerPort": 80}))
	a := b.unattached(t, pod)
	kept, err := a.reserve(t.Context())
	testutil.Must(t, err)
	defer func() { testutil.Must(t, pod.del()) }()
	_, _, err = a.plug(t.Context(), kept)
	testutil.Must(t, err)
	flushRuleset(t)
	testutil.Must(t, a.openPorts(t.Context(), kept))
	if open := b.openPorts(); len(open) != 4 {
		t.Errorf("open are %v", open)
	}
}

// ADD restores rules that are deleted right before it opens host ports.
func TestFlushBeforePortsOpen(t *testing.T) {
	const many = 1000 // the note exceeds a pipe's buffer
	b := newBed(t, nil)
	var ports []map[string]any
	for i := range many {
		ports = append(ports, map[string]any{"hostPort": 20000 + i, "containerPort": 80})
	}
	pod := b.pod(hostPorts(ports...))
	a := b.unattached(t, pod)
	kept, err := a.reserve(t.Context())
	testutil.Must(t, err)
	defer func() { testutil.Must(t, pod.del()) }()
	_, _, err = a.plug(t.Context(), kept)
	testutil.Must(t, err)

	file := b.store().Path(kept) // the plugin writes the note after the rules, and blocks until the FIFO has a reader
	testutil.Must(t, os.Remove(file))
	testutil.Must(t, unix.Mkfifo(file, 0o600))
	opened := make(chan error, 1)
	go func() { opened <- a.openPorts(t.Context(), kept) }()
	reader, err := os.Open(file)
	testutil.Must(t, err)
	flushRuleset(t)
	next := filepath.Join(b.dir, "next")
	testutil.Must(t, os.WriteFile(next, nil, 0o600))
	testutil.Must(t, os.Rename(next, file))
	_, err = io.Copy(io.Discard, reader)
	testutil.Must(t, errors.Join(err, reader.Close()))
	testutil.Must(t, <-opened)
	if open := b.openPorts(); len(open) != 2*many {
		t.Errorf("%d ports are open", len(open))
	}
}

// No other network can take a bridge without pods while a pod is being attached.
func TestBridgeKeepsNetworkDuringAdd(t *testing.T) {
	ours, theirs := newBed(t, nil), newBed(t, nil)
	left := ours.attached(nil)
	testutil.Must(t, left.del())
	testutil.Must(t, links.Cut(left.id, "eth0", true))
	pod, other := ours.pod(nil), theirs.pod(nil)
	a := ours.unattached(t, pod)
	kept, err := a.reserve(t.Context())
	testutil.Must(t, err)
	defer func() { testutil.Must(t, pod.del()) }()

	unlock, err := links.Lock(t.Context(), lockfile.Shared)
	testutil.Must(t, err)
	refused := make(chan error, 1)
	go func() { refused <- other.add() }()
	waitsFor(t, "/run/berth-net.lock")
	bridge, err := a.ready()
	testutil.Must(t, err)
	if bridge == nil {
		t.Fatal("the bridge is taken away from an ADD")
	}
	_, err = links.Plug(a.describe(bridge, kept))
	testutil.Must(t, err)
	unlock()
	if err := <-refused; codeOf(err) != types.ErrInvalidNetworkConfig || !strings.Contains(err.Error(), "1 pods of network "+ours.key()) {
		t.Errorf("ADD of the other network: %v", err)
	}
	if bridge, err := links.FindBridge("bn0"); err != nil || !bridge.BelongsTo(ours.key()) {
		t.Errorf("the bridge is not the first network's any more; %v", err)
	}
}

// If two networks start concurrently with the same bridge or the same addresses, exactly one gets
// them.
func TestConcurrentNetworksShareNoBridge(t *testing.T) {
	for what, second := range map[string]map[string]any{"bridge": {"subnets": []string{"10.98.0.0/24"}}, "subnet": {"bridge": "bn1", "subnets": []string{"10.99.0.0/16"}}} {
		for range 10 {
			beds := []*bed{newBed(t, nil), newBed(t, second)}
			var pods []*testPod
			for _, b := range beds {
				pods = append(pods, b.pod(nil))
			}
			errs := []error{nil, nil}
			var adds sync.WaitGroup
			for i, p := range pods {
				adds.Go(func() { errs[i] = p.add() })
			}
			adds.Wait()
			loser := slices.IndexFunc(errs, func(err error) bool { return err != nil })
			if loser < 0 || errs[1-loser] != nil || codeOf(errs[loser]) != types.ErrInvalidNetworkConfig {
				t.Fatalf("two ADDs with the same %s: %v", what, errs)
			}
			winner := pods[1-loser]
			if bridge, err := links.FindBridge(winner.conf["bridge"].(string)); err != nil || !bridge.BelongsTo(winner.key()) {
				t.Errorf("the bridge does not belong to the network whose ADD succeeded; %v", err)
			}
			for _, p := range pods {
				testutil.Must(t, p.del())
				testutil.Must(t, links.Cut(p.id, "eth0", true))
				if link, err := netlink.LinkByName(p.conf["bridge"].(string)); err == nil {
					testutil.Must(t, netlink.LinkDel(link))
				}
			}
		}
	}
}

// With a stuck holder of the lock of addresses, DEL and a failing ADD return an error that names
// the lock. A later DEL removes the rest.
func TestStuckAddressLockIsReported(t *testing.T) {
	b := newBed(t, nil)
	b.plugin.lockTimeout = time.Millisecond
	first := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	second := b.pod(hostPorts(map[string]any{"hostPort": 8081, "containerPort": 80}))
	a := b.unattached(t, second)
	kept, err := a.reserve(t.Context())
	testutil.Must(t, err)
	_, _, err = a.plug(t.Context(), kept)
	testutil.Must(t, err)
	testutil.Must(t, a.openPorts(t.Context(), kept))

	unlock, err := b.store().Lock(t.Context())
	testutil.Must(t, err)
	for what, err := range map[string]error{
		"DEL":                     first.del(),
		"the undo of an ADD":      asCNI(a.release(context.Background(), kept)),
		"ADD":                     b.pod(nil).add(),
		"GC":                      b.collect(),
		"GC that is repeated":     b.collect(),
		"the second DEL of a pod": first.del(),
	} {
		if codeOf(err) != types.ErrTryAgainLater || !strings.Contains(err.Error(), filepath.Join(b.dir, "test", "lock")) {
			t.Errorf("%s with another holder of the lock: %v", what, err)
		}
	}
	unlock()
	testutil.Must(t, first.del())
	testutil.Must(t, b.collect())
	if left := b.traces(); left != "" {
		t.Errorf("left are %s", left)
	}
}

// collect runs GC without valid attachments.
func (b *bed) collect() error {
	_, err := (&testPod{bed: b}).call("GC", "", map[string]any{"cni.dev/valid-attachments": []any{}})
	return err
}

// A pod that vanished without DEL, for example in a power failure, must not get its host ports
// back.
func TestHostPortsOfVanishedPodStayClosed(t *testing.T) {
	b := newBed(t, nil)
	pod := b.attached(hostPorts(map[string]any{"hostPort": 8080, "containerPort": 80}))
	dead := b.attached(hostPorts(map[string]any{"hostPort": 8081, "containerPort": 80}))
	link, err := netlink.LinkByName(links.PortName(dead.id, "eth0"))
	testutil.Must(t, err)
	testutil.Must(t, netlink.LinkDel(link))
	flushRuleset(t)
	_, err = pod.call("STATUS", "", nil)
	testutil.Must(t, err)
	for _, p := range b.openPorts() {
		if p.HostPort != 8080 {
			t.Errorf("open is %s", p)
		}
	}
	next := b.attached(hostPorts(map[string]any{"hostPort": 8081, "containerPort": 80})) // has another port than the vanished pod
	testutil.Must(t, dead.del())
	if open := b.openPorts(); len(open) != 4 || !slices.ContainsFunc(open, func(p rules.HostPort) bool { return p.Pod.String() == next.ip(false) }) {
		t.Errorf("open after the DEL of the vanished pod are %v", open)
	}
}

// The network takes over the bridge, its addresses, and deletes the rules of another network for
// it.
func TestNetworkOfEarlierVersionIsTakenOver(t *testing.T) {
	b := newBed(t, nil)
	testutil.Must(t, b.attached(nil).del())
	link, err := netlink.LinkByName("bn0")
	testutil.Must(t, err)
	conn, err := nftables.New()
	testutil.Must(t, err)
	named := func(name, marker string) {
		table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: rules.TablePrefix + name})
		conn.AddChain(&nftables.Chain{Table: table, Name: marker})
	}
	for what, alias := range map[string]string{"the first": "", "a network that took it for another program's": "berth-net bridge found by " + b.key()} {
		testutil.Must(t, netlink.LinkSetAlias(link, alias))
		addressed(t, "bn0", "10.97.0.1/24")
		conn.FlushRuleset()
		named("old-01234567", "made-from-0123456789abcdef01234567-for-bn0")
		named("other", "made-from-0123456789abcdef01234567")
		named("other-01234567", "made-from-0123456789abcdef01234567-for-bn1")
		testutil.Must(t, conn.Flush())
		testutil.Must(t, b.attached(nil).del())
		bridge, err := links.FindBridge("bn0")
		testutil.Must(t, err)
		if slices.Contains(bridge.Prefixes, netip.MustParsePrefix("10.97.0.1/24")) {
			t.Errorf("%s: the bridge has %v", what, bridge.Prefixes)
		}
		networks, err := b.plugin.filter.Networks()
		testutil.Must(t, err)
		slices.Sort(networks)
		if want := []string{"other", "other-01234567", b.key()}; !slices.Equal(networks, want) {
			t.Errorf("%s: tables of %v, want %v", what, networks, want)
		}
	}
	flushRuleset(t)
}
