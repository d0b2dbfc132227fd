// Package inventory lists everything on a machine, and everything that belongs to a daemon, by
// kind.
//
// # Contract
//
// Items are sets of names, so two inventories can be compared. OfMachine and OfDaemon serve leak
// checks. Their names are precise enough to show growth between two moments. Everything serves
// comparisons of two runs of the same requests. It describes each object in full and replaces
// values that always differ, such as IDs, addresses and times. An inventory changes nothing and
// skips objects that vanish meanwhile. The package identifies a daemon by its process, its
// directories and the IDs of its objects.
package inventory

import (
	"fmt"
	"maps"
	"slices"
)

// Items counts everything that exists, by kind and name.
type Items map[string]map[string]int

// Add adds one object of a kind.
func (s Items) Add(kind, name string) {
	if s[kind] == nil {
		s[kind] = make(map[string]int)
	}
	s[kind][name]++
}

// ownProc is the procfs that the library of SELinux mounts for itself.
const ownProc = "procfs of its own"

// madeOnce lists files and descriptors that the first pod or image creates and that stay.
var madeOnce = map[string]bool{
	"fd of the daemon: /sys/fs/cgroup":         true, // opencontainers/cgroups opens files below it by openat2
	"fd of the daemon: " + ownProc:             true,
	"file below root: /checkpoint.key":         true,
	"file below root: /checkpoints":            true,
	"file below root: /cni":                    true, // libcni's cache of results
	"file below root: /cni/results":            true,
	"file below root: /network":                true, // the built-in network
	"file below root: /network/berth-net":      true,
	"file below root: /network/berth-net/lock": true,
	"file below root: /network/berth-net/last": true,
	"file below root: /runtime/runtime.record": true, // configuration from UpdateRuntimeConfig
}

// Grown returns the names that occur more often in s than in before.
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

// Summary shortens a long list. A layer that was not deleted has hundreds of files.
func Summary(diff []string) []string {
	const limit = 40
	if len(diff) > limit {
		diff = append(diff[:limit:limit], fmt.Sprintf("… and %d more", len(diff)-limit))
	}
	return diff
}

// Differences returns the names that occur more or less often than in want.
func (s Items) Differences(want Items) []string {
	var out []string
	for _, line := range s.Grown(want) {
		out = append(out, "unexpected: "+line)
	}
	for _, line := range want.Grown(s) {
		out = append(out, "missing: "+line)
	}
	return out
}

// Map returns the items with renamed names.
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
