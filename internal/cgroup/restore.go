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

// Files that an update may write. On v1 the list is complete. On v2 an update may also name other
// files. They are globs, because each size of huge pages has a separate file.
var (
	v1Limits = map[string][]string{
		"memory": {
			"memory.limit_in_bytes",
			"memory.memsw.limit_in_bytes",
			"memory.soft_limit_in_bytes",
			"memory.swappiness",
		},
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

// limit is a file of a cgroup and the content to restore.
type limit struct{ path, content string }

// limits reads every file that an update may change. unified has v2 settings by name.
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

// restore sets the previous limits. The files are restored last, because systemd writes a unit's
// properties to them.
func (g *Group) restore(before []limit) error {
	return errors.Join(g.restoreFiles(before), g.restoreUnit(before), g.restoreFiles(before))
}

// restoreFiles restores changed files in two passes, because limits depend on each other. For
// example, v1's memory limit must not exceed the limit of memory plus swap.
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

// restore writes the previous content.
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

// noLimit removes a device's line from a file with one line per limited device.
var noLimit = map[string]string{
	"io.max":        "rbps=max wbps=max riops=max wiops=max",
	"io.weight":     "default",
	"io.bfq.weight": "default",
	"io.latency":    "target=0",
}

// lines returns the writes that change the content from now to the previous content.
func (l limit) lines(now string) []string {
	lines := strings.Split(strings.TrimSuffix(l.content, "\n"), "\n")
	reset, keyed := noLimit[filepath.Base(l.path)]
	if !keyed {
		return lines // the cpuset was empty, and an empty line empties it again
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

// restoreUnit restores the properties of the group's systemd unit, because systemd writes them to
// the files again when it reloads.
func (g *Group) restoreUnit(before []limit) error {
	if !g.systemd || !cgroups.IsCgroup2UnifiedMode() {
		return nil
	}
	if err := g.mgr.Set(resourcesOf(before)); err != nil {
		return fmt.Errorf("restore the properties of %s: %w", g.path, err)
	}
	return nil
}

// resourcesOf translates the v2 limits that systemd has properties for.
func resourcesOf(limits []limit) *cgroups.Resources {
	r := &cgroups.Resources{SkipDevices: true, SkipFreezeOnSet: true, Unified: map[string]string{}}
	for _, l := range limits {
		fields := append(strings.Fields(l.content), "", "")
		switch name := filepath.Base(l.path); name {
		case "memory.max":
			r.Memory = number(fields[0])
		case "memory.low":
			r.MemoryReservation = number(fields[0])
		case "memory.min",
			"memory.high",
			"memory.swap.max",
			"pids.max": // includes memory.swap.max, because a sum cannot express "no swap" to systemd
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

// number parses a value of a v2 file. "max" means no limit, here -1.
func number(text string) int64 {
	if text == "max" {
		return -1
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0 // not set
	}
	return n
}
