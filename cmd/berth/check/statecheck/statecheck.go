// Package statecheck compares what berth has written down with what is on the machine, and
// names each difference.
//
// # Contract
//
// There are ten invariants, each in a file of its own that begins with what it says:
// processes, shims, netns, addresses, layers, mounts, fds, records, bytes and views. All hold
// at every moment, with the daemon running or not, but for what the daemon is about
// to do: what a record says is being made or removed may be there or not, and what
// a daemon that does not run left half done is not a difference, because the next one goes on with it.
//
// Run changes nothing and takes no lock, so the daemon works on meanwhile. What it sees
// in the middle of an operation looks like a difference, so it looks again, and names only
// what is still there when it has looked several times within a second.
package statecheck

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"berth/cmd/berth/config"
	"berth/cmd/berth/node"
	"berth/cni"
)

// Difference is one thing that is not as an invariant says.
type Difference struct {
	Invariant string `json:"invariant"`
	Object    string `json:"object"` // what it is about: "pod 1234…", a path
	Expected  string `json:"expected"`
	Found     string `json:"found"`
}

// String is the difference in one line.
func (d Difference) String() string {
	return fmt.Sprintf("%s: %s: expected %s, found %s", d.Invariant, d.Object, d.Expected, d.Found)
}

// same tells whether two looks found the same difference. How it was found, which may hold
// figures, does not matter.
func (d Difference) same(other Difference) bool {
	d.Found = other.Found
	return d == other
}

// Report is the outcome of a check.
type Report struct {
	Differences []Difference `json:"differences"`
	Skipped     []string     `json:"skipped,omitempty"` // invariants that could not be looked at, and why

	// What was compared, so that nobody takes the wrong directory for a clean one.
	Daemon     int `json:"daemon"` // its process ID, 0: none runs
	Pods       int `json:"pods"`
	Containers int `json:"containers"`
	Images     int `json:"images"`
}

// Node tells where the state to check is.
type Node struct {
	Root, State string // the daemon's directories
	Socket      string // where it serves CRI
	NetNSDir    string // where network namespaces are pinned
	CNIConfDir  string
	CNICacheDir string
	CNIRunDir   string // where plugins that run are noted
	Networks    cni.Readers
	Network     []byte // the configuration list of berth's own; nil: the one in CNIConfDir is used
	Bytes       bool   // read what is in every layer: all files of the images

	proc   string // "/proc"; another directory in tests
	pauses []time.Duration
}

// NodeOf is the state of a daemon with this configuration. An error says what is wrong with that.
func NodeOf(cfg *config.Config) (*Node, error) {
	network, err := node.NetworkConfig(cfg, nil)
	return &Node{Root: cfg.Root, State: cfg.State, Socket: cfg.Listen, NetNSDir: cfg.NetNSDir,
		CNIConfDir: cfg.CNIConfDir, CNICacheDir: network.CacheDir, CNIRunDir: node.CNIRunDir(cfg), Networks: network.Readers, Network: network.List}, err
}

// The pauses between looks, as long as there are differences.
var usualPauses = []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 300 * time.Millisecond, 400 * time.Millisecond}

// invariants, in the order in which they are reported.
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

// Run looks at all invariants. An error says that something could not be read.
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
		report.Skipped = append(report.Skipped, "bytes: they are read only when that is asked for")
	}
	return report, nil
}

// look gathers all facts and compares them once.
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
	*d.found = append(*d.found, Difference{Invariant: d.invariant, Object: object, Expected: expected, Found: fmt.Sprintf(format, args...)})
}

func (f *facts) report(found []Difference) *Report {
	r := &Report{Differences: found, Daemon: f.daemon, Pods: len(f.pods), Containers: len(f.containers), Images: len(f.images)}
	slices.SortStableFunc(r.Differences, func(a, b Difference) int {
		return strings.Compare(order(a)+a.Object, order(b)+b.Object)
	})
	if f.daemon == 0 {
		r.Skipped = append(r.Skipped, "fds, views: the daemon does not run")
	}
	return r
}

// order sorts by invariant.
func order(d Difference) string {
	for i, v := range invariants {
		if v.name == d.Invariant {
			return string(rune('a' + i))
		}
	}
	return "z"
}
