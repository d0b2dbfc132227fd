package cni

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"google.golang.org/grpc/codes"

	"berth/cni/berthnet"
	"berth/internal/errdefs"
)

// ownList is a network of berth-net.
const ownList = `{"cniVersion":"1.1.0","name":"pods","plugins":[{"type":"berth-net","bridge":"bn0","subnets":["10.99.0.0/24"],"capabilities":{"ipRanges":true}}]}`

// STATUS is asked about the addresses that new pods get, also when these change while it is being asked.
func TestStatusIsAboutRanges(t *testing.T) {
	b := newBed(t)
	b.plugin("berth-net", `[ -e $record/go ] || { touch $record/asked; while [ ! -e $record/go ]; do sleep 0.01; done; }
grep -q 10.1.2.0/24 $record/berth-net.STATUS.stdin || { echo '{"code":50,"msg":"the subnet overlaps"}'; exit 1; }`)
	b.writeConf("1.conflist", ownList)
	n := b.start()
	eventually(t, "STATUS is asked", func() bool { _, err := os.Stat(b.record + "/asked"); return err == nil })
	ranges, err := ParsePodCIDRs("10.1.2.0/24")
	must(t, err)
	n.SetIPRanges(ranges)
	must(t, os.WriteFile(b.record+"/go", nil, 0o600))
	b.ready(true)
	if seen := b.saw("berth-net.STATUS.stdin"); !strings.Contains(seen, `"runtimeConfig":{"ipRanges":[[{"subnet":"10.1.2.0/24"}]]}`) {
		t.Errorf("STATUS saw %s", seen)
	}
	must(t, n.AskStatus(t.Context()))
	n.SetIPRanges(nil)
	eventually(t, "the plugin's word", func() bool {
		err := n.Status(context.Background())
		return errdefs.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "the subnet overlaps")
	})
}

// lines is a log that a test reads.
type lines struct {
	lock sync.Mutex // of text
	text bytes.Buffer
}

func (l *lines) Write(data []byte) (int, error) {
	l.lock.Lock()
	defer l.lock.Unlock()
	return l.text.Write(data)
}

func (l *lines) count(what string) int {
	l.lock.Lock()
	defer l.lock.Unlock()
	return strings.Count(l.text.String(), what)
}

// A firewall that drops what pods forward is named in the log, once, and in verbose Status; the network is ready all the same.
func TestObstaclesAreNamed(t *testing.T) {
	conn, err := nftables.New()
	must(t, err)
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "filter"})
	drop := nftables.ChainPolicyDrop
	conn.AddChain(&nftables.Chain{Table: table, Name: "FORWARD", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	must(t, conn.Flush())
	removed := false
	remove := func() {
		if !removed {
			conn.DelTable(table)
			must(t, conn.Flush())
			removed = true
		}
	}
	defer remove()

	log := &lines{}
	own := &berthnet.Plugin{}
	defer func() { must(t, own.Close()) }()
	n, err := New(Config{ConfDir: "/nowhere", BinDirs: []string{"/nowhere"}, CacheDir: t.TempDir(), List: []byte(ownList), BuiltIn: map[string]BuiltIn{berthnet.Type: own.Exec}},
		slog.New(slog.NewTextHandler(io.MultiWriter(log, testWriter{t}), nil)))
	must(t, err)
	defer n.Close()
	b := &bed{t: t, n: n}
	b.ready(true)
	eventually(t, "a look", func() bool { return !n.view.Load().obstaclesAt.IsZero() })
	if all := n.Info().Obstacles; len(all) != 1 || !strings.Contains(all[0], "ip filter FORWARD") || !strings.Contains(all[0], "DOCKER-USER") {
		t.Errorf("obstacles are %q", all)
	}
	b.lookForObstacles()
	const warning = "may not reach everybody"
	if log.count(warning) != 1 {
		t.Errorf("%d warnings", log.count(warning))
	}
	remove()
	b.lookForObstacles()
	if all := n.Info().Obstacles; len(all) != 0 || log.count(warning) != 1 || log.count("nothing is in the way") != 1 {
		t.Errorf("with the firewall gone obstacles are %q, with %d warnings", all, log.count(warning))
	}
}

// lookForObstacles makes the owner look, and waits until it did.
func (b *bed) lookForObstacles() {
	b.t.Helper()
	begin := time.Now()
	eventually(b.t, "another look", func() bool {
		now := b.n.view.Load()
		if now.obstaclesAt.After(begin) {
			return true
		}
		if time.Since(now.obstaclesAt) < maxObstaclesAge { // the owner may store another view at the same time
			old := *now
			old.obstaclesAt = old.obstaclesAt.Add(-2 * maxObstaclesAge)
			b.n.view.CompareAndSwap(now, &old)
			b.n.askRefresh()
		}
		return false
	})
}

// A look for obstacles that fails is logged once, not repeated with each STATUS, and no reason not to be ready.
func TestFailedLookForObstacles(t *testing.T) {
	b := newBed(t)
	b.plugin("berth-net", `exit 0`)
	b.writeConf("1.conflist", ownList)
	taken := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "bn0"}, PeerName: "bn0-peer"} // not a bridge
	must(t, netlink.LinkAdd(taken))
	defer func() { must(t, netlink.LinkDel(taken)) }()
	log := &lines{}
	n, err := New(Config{ConfDir: b.conf, BinDirs: []string{b.bin}, CacheDir: b.cache, RunDir: b.runs}, slog.New(slog.NewTextHandler(io.MultiWriter(log, testWriter{t}), nil)))
	must(t, err)
	defer n.Close()
	b.n = n
	b.ready(true)
	const warning = "bn0 is no bridge"
	eventually(t, "the warning", func() bool { return log.count(warning) == 1 })
	var at time.Time
	eventually(t, "the next look waits", func() bool { at = n.view.Load().obstaclesAt; return !at.IsZero() }) // it is logged before
	asked := len(b.calls())
	eventually(t, "STATUS is asked three times", func() bool { // the first two have been judged then
		n.askRefresh()
		return len(b.calls()) >= asked+3
	})
	if again := n.view.Load().obstaclesAt; again != at {
		t.Error("STATUS has it looked again")
	}
	b.lookForObstacles()
	if log.count(warning) != 1 {
		t.Errorf("%d warnings", log.count(warning))
	}

	must(t, netlink.LinkDel(taken))
	b.lookForObstacles()
	must(t, netlink.LinkAdd(taken))
	b.lookForObstacles()
	eventually(t, "a warning of what is back", func() bool { return log.count(warning) == 2 })
	must(t, n.Status(context.Background()))
}

// What is in the way of pods is looked for with the addresses that they get, and anew when these change.
func TestObstaclesAreAboutRanges(t *testing.T) {
	conn, err := nftables.New()
	must(t, err)
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "filter"})
	drop := nftables.ChainPolicyDrop
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "FORWARD", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 3},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{10, 1, 2}}, &expr.Verdict{Kind: expr.VerdictAccept}}})
	must(t, conn.Flush())
	defer func() {
		conn.DelTable(table)
		must(t, conn.Flush())
	}()
	own := &berthnet.Plugin{}
	defer func() { must(t, own.Close()) }()
	n, err := New(Config{ConfDir: "/nowhere", BinDirs: []string{"/nowhere"}, CacheDir: t.TempDir(), List: []byte(ownList), BuiltIn: map[string]BuiltIn{berthnet.Type: own.Exec}},
		slog.New(slog.NewTextHandler(testWriter{t}, nil)))
	must(t, err)
	defer n.Close()
	(&bed{t: t, n: n}).ready(true)
	for _, c := range []struct {
		cidr      string
		obstacles int
	}{{"", 1}, {"10.1.2.0/24", 0}, {"10.1.3.0/24", 1}} {
		var ranges [][]IPRange
		if c.cidr != "" {
			ranges, err = ParsePodCIDRs(c.cidr)
			must(t, err)
		}
		n.SetIPRanges(ranges)
		eventually(t, "obstacles of pods of "+c.cidr, func() bool { return len(n.Info().Obstacles) == c.obstacles })
		if found, err := n.LookForObstacles(); err != nil || len(found) != c.obstacles {
			t.Errorf("with the pod CIDR %q: %v, %v", c.cidr, found, err)
		}
	}
}
