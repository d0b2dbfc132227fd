package cgroup

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
)

// The files that an update may write, by v1 hierarchy, and on v2, beside those that it names.
// Globs, for there is a file for each size of huge pages.
var (
	v1Limits = map[string][]string{
		"memory":  {"memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.soft_limit_in_bytes", "memory.swappiness"},
		"cpu":     {"cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.cfs_burst_us", "cpu.idle"},
		"cpuset":  {"cpuset.cpus", "cpuset.mems"},
		"hugetlb": {"hugetlb.*.limit_in_bytes"},
		"pids":    {"pids.max"},
	}
	v2Limits = []string{
		"memory.max", "memory.swap.max", "memory.low", "cpu.idle", "cpu.weight", "cpu.max", "cpu.max.burst",
		"cpuset.cpus", "cpuset.mems", "hugetlb.*.max", "pids.max",
	}
)

// limit is a file of a cgroup and what it held.
type limit struct{ path, content string }

// limits reads all that an update with these settings of v2 by name may change.
func (g *Group) limits(unified map[string]string) ([]limit, error) {
	var patterns []string
	if cgroups.IsCgroup2UnifiedMode() {
		for _, name := range slices.Concat(v2Limits, slices.Sorted(maps.Keys(unified))) {
			patterns = append(patterns, filepath.Join(g.mgr.Path(""), name))
		}
	} else {
		for hierarchy, names := range v1Limits {
			if dir := g.mgr.Path(hierarchy); dir != "" {
				for _, name := range names {
					patterns = append(patterns, filepath.Join(dir, name))
				}
			}
		}
	}
	var all []limit
	for _, pattern := range patterns {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		if _, named := unified[filepath.Base(pattern)]; named && len(paths) == 0 {
			return nil, fmt.Errorf("%w: %s", ErrNoSuchSetting, filepath.Base(pattern))
		}
		for _, path := range paths {
			content, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			all = append(all, limit{path, string(content)})
		}
	}
	return all, nil
}

// restore sets back what was before. systemd writes the properties of a unit to the files, so the
// files come last.
func (g *Group) restore(before []limit) error {
	return errors.Join(g.restoreFiles(before), g.tellSystemd(before), g.restoreFiles(before))
}

// restoreFiles writes back what is not as it was. Limits depend on each other (v1 has that
// of memory never above that of memory and swap), so it goes through them twice.
func (g *Group) restoreFiles(before []limit) error {
	var err error
	for range 2 {
		err = nil
		for _, l := range before {
			err = errors.Join(err, l.restore())
		}
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("restore limits of cgroup %s: %w", g.path, err)
}

// restore makes the file hold what it held.
func (l limit) restore() error {
	now, err := os.ReadFile(l.path)
	if err != nil {
		return ignoreGone(err)
	}
	if string(now) == l.content {
		return nil
	}
	for _, line := range l.lines(string(now)) {
		if err := writeFile(l.path, line+"\n"); err != nil { // an empty write would not reach the kernel
			return ignoreGone(err)
		}
	}
	return nil
}

// noLimit is what takes a device's line out of a file that has one line for each device with a limit.
var noLimit = map[string]string{
	"io.max":        "rbps=max wbps=max riops=max wiops=max",
	"io.weight":     "default",
	"io.bfq.weight": "default",
	"io.latency":    "target=0",
}

// lines is what has to be written, one write each, so that now becomes what was.
func (l limit) lines(now string) []string {
	lines := strings.Split(strings.TrimSuffix(l.content, "\n"), "\n")
	reset, keyed := noLimit[filepath.Base(l.path)]
	if !keyed {
		return lines // a cpuset that was empty: an empty line empties it
	}
	was := map[string]bool{"": true}
	for _, line := range lines {
		key, _, _ := strings.Cut(line, " ")
		was[key] = true
	}
	lines = slices.DeleteFunc(lines, func(line string) bool { return line == "" })
	for line := range strings.Lines(now) {
		if key, _, _ := strings.Cut(strings.TrimSpace(line), " "); !was[key] {
			lines = append(lines, key+" "+reset)
		}
	}
	return lines
}

// tellSystemd sets the properties of the group's unit as the limits were: systemd writes them
// to the files again when it reloads.
func (g *Group) tellSystemd(before []limit) error {
	if !g.systemd || !cgroups.IsCgroup2UnifiedMode() {
		return nil
	}
	if err := g.mgr.Set(resourcesOf(before)); err != nil {
		return fmt.Errorf("restore the properties of %s: %w", g.path, err)
	}
	return nil
}

// resourcesOf translates limits of v2 that systemd has properties for.
func resourcesOf(limits []limit) *cgroups.Resources {
	r := &cgroups.Resources{SkipDevices: true, SkipFreezeOnSet: true, Unified: map[string]string{}}
	for _, l := range limits {
		fields := append(strings.Fields(l.content), "", "")
		switch name := filepath.Base(l.path); name {
		case "memory.max":
			r.Memory = number(fields[0])
		case "memory.low":
			r.MemoryReservation = number(fields[0])
		case "memory.min", "memory.high", "memory.swap.max", "pids.max": // of swap also that there is none, which no sum tells systemd
			r.Unified[name] = fields[0]
		case "cpu.weight":
			r.CpuWeight = uint64(max(number(fields[0]), 0))
		case "cpu.max":
			r.CpuQuota, r.CpuPeriod = number(fields[0]), uint64(max(number(fields[1]), 0))
		case "cpuset.cpus":
			r.CpusetCpus = fields[0]
		case "cpuset.mems":
			r.CpusetMems = fields[0]
		}
	}
	return r
}

// number reads a number of a v2 file, where "max" means no limit, -1 here.
func number(text string) int64 {
	if text == "max" {
		return -1
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0 // left out: not set
	}
	return n
}
