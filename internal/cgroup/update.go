package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/fs2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// ErrMemoryInUse means that a group uses more memory than its new limit allows. Memory that the
// kernel could reclaim does not count.
var ErrMemoryInUse = errors.New("more memory in use than the new limit allows")

// ErrNoSuchSetting means that this kernel, or this group's controllers, lack a v2 setting that the
// caller named.
var ErrNoSuchSetting = errors.New("no such setting")

// Update sets resource limits. If it returns an error, it has set none of them. Fields that r
// leaves out keep their values. restore sets the previous limits.
//
// Errors: ErrMemoryInUse, ErrNoSuchSetting, and errors of the kernel (EINVAL, ERANGE for invalid
// values) or systemd.
func (g *Group) Update(r *specs.LinuxResources) (restore func() error, err error) {
	before, err := g.limits(r.Unified)
	if err != nil {
		return nil, fmt.Errorf("set limits of cgroup %s: %w", g.path, err)
	}
	restore = func() error { return g.restore(before) }
	if err := g.makeRoom(r.Memory); err != nil {
		return nil, fmt.Errorf("set limits of cgroup %s: %w", g.path, err)
	}
	if err := g.set(convert(r)); err != nil {
		return nil, errors.Join(fmt.Errorf("set limits of cgroup %s: %w", g.path, err), g.restoreFiles(before))
	}
	return restore, nil
}

// set writes the files first, even with the systemd driver. systemd accepts nearly all values, and
// would retry refused ones at every reload.
func (g *Group) set(r *cgroups.Resources) error {
	failpoint.Reach("cgroup.set-limits")
	if g.systemd && cgroups.IsCgroup2UnifiedMode() {
		files, err := fs2.NewManager(&cgroups.Cgroup{}, g.mgr.Path(""))
		if err != nil {
			return err
		}
		if err := files.Set(r); err != nil {
			return err
		}
	}
	err := g.mgr.Set(r)
	failpoint.Reach("cgroup.limits-set")
	return err
}

// makeRoom makes v2 refuse a limit below the memory in use, as v1 does. The v2 kernel would
// otherwise kill processes until the limit holds. makeRoom ignores limits that are not lowered. It
// also ignores page cache, which the kernel reclaims first.
func (g *Group) makeRoom(memory *specs.LinuxMemory) error {
	if memory == nil || memory.Limit == nil || *memory.Limit <= 0 {
		return nil
	}
	if !cgroups.IsCgroup2UnifiedMode() {
		return g.tryMemory(*memory.Limit)
	}
	return makeRoomIn(g.mgr.Path(""), *memory.Limit)
}

// makeRoomIn is makeRoom for the group in a v2 directory.
func makeRoomIn(dir string, limit int64) error {
	now, err := os.ReadFile(filepath.Join(dir, "memory.max"))
	if err != nil {
		return ignoreGone(err)
	}
	if had := strings.TrimSpace(string(now)); had != "max" && number(had) <= limit {
		return nil
	}
	used, err := readNumber(filepath.Join(dir, "memory.current"))
	if err != nil {
		return ignoreGone(err) // if the controller is missing, setting the limit fails later
	}
	stat, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
	if err != nil {
		return ignoreGone(err)
	}
	if held := used - reclaimable(string(stat)); held > limit {
		return fmt.Errorf("%w: %d bytes, limit %d", ErrMemoryInUse, held, limit)
	}
	return nil
}

// reclaimable returns the bytes of page cache and kernel caches in memory.stat. memory.reclaim
// would give the exact number, but takes too long if the kernel can reclaim little.
func reclaimable(stat string) (sum int64) {
	for line := range strings.Lines(stat) {
		switch key, value, _ := strings.Cut(strings.TrimSpace(line), " "); key {
		case "active_file", "inactive_file", "slab_reclaimable":
			sum += number(value)
		}
	}
	return sum
}

// tryMemory sets a lower limit to find out whether the v1 kernel accepts it. libcontainer hides the
// kernel's EBUSY.
func (g *Group) tryMemory(limit int64) error {
	file := filepath.Join(g.mgr.Path("memory"), "memory.limit_in_bytes")
	now, err := readNumber(file)
	if err != nil || now <= limit {
		return ignoreGone(err)
	}
	if err := writeFile(file, strconv.FormatInt(limit, 10)); errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%w: limit %d", ErrMemoryInUse, limit)
	}
	return nil // Set returns any other error again
}

func readNumber(path string) (int64, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

// convert translates runtime-spec resources. An update does not change devices.
func convert(r *specs.LinuxResources) *cgroups.Resources {
	c := &cgroups.Resources{SkipDevices: true, SkipFreezeOnSet: true, Unified: r.Unified}
	if m := r.Memory; m != nil {
		c.Memory = value(m.Limit)
		c.MemoryReservation = value(m.Reservation)
		c.MemorySwap = value(m.Swap)
		c.MemorySwappiness = m.Swappiness
	}
	if p := r.CPU; p != nil {
		c.CpuShares = value(p.Shares)
		c.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(c.CpuShares)
		c.CpuQuota = value(p.Quota)
		c.CpuPeriod = value(p.Period)
		c.CpuBurst = p.Burst
		c.CpusetCpus = p.Cpus
		c.CpusetMems = p.Mems
		c.CPUIdle = p.Idle
	}
	if r.Pids != nil {
		c.PidsLimit = r.Pids.Limit
	}
	for _, h := range r.HugepageLimits {
		c.HugetlbLimit = append(c.HugetlbLimit, &cgroups.HugepageLimit{Pagesize: h.Pagesize, Limit: h.Limit})
	}
	return c
}

func value[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
