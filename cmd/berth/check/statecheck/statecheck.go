// Package statecheck compares berth's records with the machine, and names each difference.
//
// # Contract
//
// Ten invariants hold at every moment, with the daemon running or not: processes, shims, netns,
// addresses, layers, mounts, fds, records, bytes and views. Each has a file that begins with its
// definition. Objects that a record marks as being created or removed may exist or
// not. Work that a stopped daemon left unfinished is not a difference, because the next daemon
// continues it.
//
// Run changes nothing and takes no lock, so the daemon continues to work. An operation in progress
// can appear as a difference. So Run compares several times within a second, and reports only
// differences that persist.
package statecheck

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni"
)

// Difference is a violation of an invariant.
type Difference struct {
	Invariant string `json:"invariant"`
	Object    string `json:"object"`   // for example "pod 1234…", or a path
	Expected  string `json:"expected"` // empty: Found says everything
	Found     string `json:"found"`
}

// String formats the difference on one line.
func (d Difference) String() string {
	if d.Expected == "" {
		return fmt.Sprintf("%s: %s: %s", d.Invariant, d.Object, d.Found)
	}
	return fmt.Sprintf("%s: %s: expected %s, found %s", d.Invariant, d.Object, d.Expected, d.Found)
}

// same reports whether two comparisons found the same difference. It ignores Found, which may
// contain changing figures.
func (d Difference) same(other Difference) bool {
	d.Found = other.Found
	return d == other
}

// Report is the result of a check.
type Report struct {
	Differences []Difference `json:"differences"`
	Skipped     []string     `json:"skipped,omitempty"` // skipped invariants, with the reason
	Pending     []string     `json:"pending,omitempty"` // pods of failed starts that plugins do not release

	// Counts of compared objects. They show that the check looked at the right directories.
	Daemon     int `json:"daemon"` // process ID, 0: not running
	Pods       int `json:"pods"`
	Containers int `json:"containers"`
	Images     int `json:"images"`
}

// Node locates the state to check.
type Node struct {
	Root, State string // the daemon's directories
	Socket      string // its CRI socket
	Metrics     string // the address of its metrics; may be empty
	NetNSDir    string // directory of pinned network namespaces
	CNIConfDir  string
	CNICacheDir string
	CNIRunDir   string // records of running CNI plugins
	Networks    cni.Readers
	Network     []byte        // configuration list of the built-in network; nil: CNIConfDir has the network
	PartialTTL  time.Duration // how long the layers of failed pulls are kept
	Bytes       bool          // read the content of every layer

	proc   string // "/proc"; another directory in tests
	pauses []time.Duration
}

// NodeOf returns the state of a daemon with this configuration. It fails if the configuration is
// invalid.
func NodeOf(cfg *config.Config) (*Node, error) {
	network, err := node.NetworkConfig(cfg, nil)
	return &Node{
		Root:        cfg.Root,
		State:       cfg.State,
		Socket:      cfg.Listen,
		Metrics:     cfg.MetricsAddress,
		NetNSDir:    cfg.NetNSDir,
		CNIConfDir:  cfg.CNIConfDir,
		CNICacheDir: network.CacheDir,
		CNIRunDir:   node.CNIRunDir(cfg),
		Networks:    network.Readers,
		Network:     network.List,
		PartialTTL:  cfg.PartialLayerTTL.Duration,
	}, err
}

// Pauses between comparisons while differences exist.
var usualPauses = []time.Duration{
	100 * time.Millisecond,
	200 * time.Millisecond,
	300 * time.Millisecond,
	400 * time.Millisecond,
}

// invariants in the order of reports.
var invariants = []struct {
	name    string
	compare func(*facts, *finder)
}{
	{"processes", compareProcesses},
	{"shims", compareShims},
	{"netns", compareNamespaces},
	{"addresses", compareAddresses},
	{"layers", compareLayers},
	{"mounts", compareMounts},
	{"fds", compareDescriptors},
	{"records", compareRecords},
	{"views", compareViews},
}

// Run checks all invariants. It fails if it cannot read something.
func Run(ctx context.Context, n *Node) (*Report, error) {
	if n.proc == "" {
		n.proc = "/proc"
	}
	if n.pauses == nil {
		n.pauses = usualPauses
	}
	facts, found, err := look(ctx, n)
	for _, pause := range n.pauses {
		if err != nil || len(found) == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
		before := found
		facts, found, err = look(ctx, n)
		found = slices.DeleteFunc(found, func(d Difference) bool { return !slices.ContainsFunc(before, d.same) })
	}
	if err != nil {
		return nil, err
	}
	report := facts.report(found)
	if n.Bytes {
		if err := compareBytes(ctx, facts, report); err != nil {
			return nil, err
		}
	} else {
		report.Skipped = append(report.Skipped, "bytes: needs --bytes")
	}
	return report, nil
}

// look gathers all facts, and compares them once.
func look(ctx context.Context, n *Node) (*facts, []Difference, error) {
	f, err := gather(ctx, n)
	if err != nil {
		return nil, nil, err
	}
	found := []Difference{}
	for _, i := range invariants {
		i.compare(f, &finder{invariant: i.name, found: &found})
	}
	return f, found, nil
}

// finder collects the differences of one invariant.
type finder struct {
	invariant string
	found     *[]Difference
}

func (d *finder) differ(object, expected, format string, args ...any) {
	*d.found = append(*d.found,
		Difference{Invariant: d.invariant, Object: object, Expected: expected, Found: fmt.Sprintf(format, args...)})
}

func (f *facts) report(found []Difference) *Report {
	r := &Report{
		Differences: found,
		Daemon:      f.daemon,
		Pods:        len(f.pods),
		Containers:  len(f.containers),
		Images:      len(f.images),
		Pending:     f.pending(),
	}
	slices.SortStableFunc(r.Differences, func(a, b Difference) int {
		return strings.Compare(order(a)+a.Object, order(b)+b.Object)
	})
	if f.daemon == 0 {
		r.Skipped = append(r.Skipped, "fds, views: the daemon is not running")
	}
	return r
}

// pending describes pods of failed starts that berth cannot undo. No client sees them.
func (f *facts) pending() (list []string) {
	for _, id := range slices.Sorted(maps.Keys(f.pods)) {
		p := f.pods[id]
		if p.Undo == nil {
			continue
		}
		network := "none"
		if p.Network != nil {
			network = p.Network.Network
		}
		md := p.Config.GetMetadata()
		list = append(list, fmt.Sprintf("%s (%s/%s, network %s): its removal has failed %d times since %s: %s", podName(id),
			md.GetNamespace(), md.GetName(), network, p.Undo.Failures, p.Undo.Since.Format(time.RFC3339), p.Undo.Error))
	}
	return list
}

// order returns a key that sorts by invariant.
func order(d Difference) string {
	for i, v := range invariants {
		if v.name == d.Invariant {
			return string(rune('a' + i))
		}
	}
	return "z"
}
