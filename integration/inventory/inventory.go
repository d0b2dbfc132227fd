// Package inventory lists everything on a machine, and of a daemon on it, by kind.
//
// # Contract
//
// Items are sets of names, so two inventories can be compared. OfMachine and OfDaemon serve leak
// checks: they name things finely enough to see growth between two moments. Everything serves
// comparisons of two runs of the same requests. It describes each thing in full and replaces values
// that always differ, such as IDs, addresses and times. An inventory changes nothing and skips
// things that vanish meanwhile. The package identifies a daemon by its process, its directories and
// the IDs of its objects.
package inventory

import (
	"fmt"
	"maps"
	"slices"
)

// Items is what exists, by kind: for each kind a set of names with how often
// each occurs.
type Items map[string]map[string]int

// Add adds one of a kind.
func (s Items) Add(kind, name string) {
	if s[kind] == nil {
		s[kind] = make(map[string]int)
	}
	s[kind][name]++
}

// madeOnce are the things that the first pod or image makes and that stay for good.
var madeOnce = map[string]bool{
	"fd of the daemon: /sys/fs/cgroup":         true, // opencontainers/cgroups opens files below it by openat2
	"file below root: /cni":                    true, // libcni's cache of results
	"file below root: /cni/results":            true,
	"file below root: /network":                true, // berth's own network
	"file below root: /network/berth-net":      true,
	"file below root: /network/berth-net/lock": true,
	"file below root: /network/berth-net/last": true,
	"file below root: /runtime/runtime.record": true, // what UpdateRuntimeConfig said
}

// Grown names everything there is more of in s than in before.
func (s Items) Grown(before Items) []string {
	var out []string
	for _, kind := range slices.Sorted(maps.Keys(s)) {
		for _, name := range slices.Sorted(maps.Keys(s[kind])) {
			n, was := s[kind][name], before[kind][name]
			if n > was && !(n == 1 && madeOnce[kind+": "+name]) {
				out = append(out, fmt.Sprintf("%s: %s (%d, before %d)", kind, name, n, was))
			}
		}
	}
	return out
}

// Summary shortens a list that is too long to be read: a layer that was not deleted
// has hundreds of files.
func Summary(diff []string) []string {
	const limit = 40
	if len(diff) > limit {
		diff = append(diff[:limit:limit], fmt.Sprintf("… and %d more", len(diff)-limit))
	}
	return diff
}

// Differences names what there is more or less of than in want.
func (s Items) Differences(want Items) []string {
	var out []string
	for _, line := range s.Grown(want) {
		out = append(out, "too much: "+line)
	}
	for _, line := range want.Grown(s) {
		out = append(out, "missing: "+line)
	}
	return out
}

// Map returns the items with other names.
func (s Items) Map(rename func(kind, name string) string) Items {
	out := Items{}
	for kind, names := range s {
		for name, n := range names {
			for range n {
				out.Add(kind, rename(kind, name))
			}
		}
	}
	return out
}
