// Package memory bounds the memory that the daemon and its berth-unpack processes use, and returns
// memory to the kernel when the daemon is idle.
package memory

import (
	"log/slog"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"berth/image/erofs"
	"berth/image/registry"
	"berth/image/unpack/budget"
)

// Budget is the memory, in bytes, that pulls may use: the daemon's heap and the processes that
// unpack layers. 0 means unlimited.
type Budget int64

const (
	// nodeShare and maxBudget bound the budget: a share of the node's memory, and an upper limit
	// beyond which pulls gain nothing.
	nodeShare = 0.25
	maxBudget = 2 << 30
	// ownShare is the daemon's part of the budget. The rest is for berth-unpack.
	ownShare = 0.5
	// unpackerShare is the memory that one berth-unpack may need, in bytes, in addition to an
	// unusually large zstd window or tree. One half does not depend on the layer. The other half is
	// its part of workShare.
	unpackerShare = 32 << 20
	// aheadShare is the part of the daemon's share that blobs fetched ahead may use.
	aheadShare = 0.25
	// mergeShare is the part of the daemon's share that merging the layers of an image may use.
	mergeShare = 0.25
	// lazyShare is the part of the daemon's share for layers that are fetched after pulls.
	lazyShare = 0.25
	// workShare is the part of berth-unpack's share that all these processes together may keep
	// live. Garbage adds half as much. The rest is for half of unpackerShare per process.
	workShare = 1. / 3
)

// budgetFor returns the budget for a cgroup's memory limit (0: none) and a node's memory, in bytes.
func budgetFor(limit, node int64) Budget {
	budget := min(maxBudget, int64(nodeShare*float64(node)))
	if limit > 0 {
		budget = min(budget, limit)
	}
	return Budget(budget)
}

// SetLimit sets Go's memory limit to the daemon's share of the budget, so that the kernel does not
// kill the daemon for uncollected garbage. GOMEMLIMIT overrides it. It returns the budget, or 0 if
// it cannot determine one.
func SetLimit(log *slog.Logger) Budget {
	limit, err := OwnLimit("/")
	if err != nil {
		log.Warn("ignoring the memory limit of berth's cgroup", "error", err)
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		log.Warn("read the node's memory size", "error", err)
		return Budget(limit)
	}
	budget := budgetFor(limit, int64(info.Totalram)*int64(info.Unit))
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(int64(ownShare * float64(budget)))
	}
	return budget
}

// Unpackers returns how many layers may be unpacked at a time. Each concurrent unpacking takes one
// process in the daemon's cgroup. 0 selects the default of package budget.
func (b Budget) Unpackers() int {
	if b == 0 {
		return 0
	}
	return int(min(budget.DefaultSlots, max(1, (1-ownShare)*float64(b)/unpackerShare)))
}

// RangeRequests returns how many parts of layers may be fetched ahead at a time, at most limit. The
// daemon keeps each part in memory.
func (b Budget) RangeRequests(limit int) int {
	if b == 0 {
		return limit
	}
	return int(min(float64(limit), aheadShare*ownShare*float64(b)/registry.PartSize))
}

// LazyMemory returns how many bytes the daemon may use for parts of layers that are fetched after
// pulls, at most limit.
func (b Budget) LazyMemory(limit int64) int64 {
	if b == 0 {
		return limit
	}
	return min(limit, int64(lazyShare*ownShare*float64(b)))
}

// MergeMemory returns how many bytes the daemon may use to merge EROFS layers. 0 selects the
// default of package image. With image.layer_driver = "auto" an image that needs more is stored as
// directories.
func (b Budget) MergeMemory() int64 {
	if b == 0 {
		return 0
	}
	return min(erofs.MaxMemory, int64(mergeShare*ownShare*float64(b)))
}

// WorkMemory returns how many bytes all berth-unpack processes together may keep live. 0 selects
// the default of package budget.
func (b Budget) WorkMemory() int64 { return int64(workShare * (1 - ownShare) * float64(b)) }
