package main

import (
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"berth/cmd/berth/serve/memory"
	"berth/image"
	"berth/image/erofs"
	"berth/image/registry"
)

// What berth takes of a node for pulls, where its cgroup allows no less: a part of the memory, and
// no more than is of use. All that layers make it take comes out of this: the daemon's own heap,
// and the processes that unpack layers.
const (
	nodeShare  = 0.25
	mostBudget = 2 << 30
)

// budgetFor returns how many bytes that is, for a node with so much memory and that memory limit.
// 0: no limit.
func budgetFor(limit, node int64) int64 {
	budget := min(mostBudget, int64(nodeShare*float64(node)))
	if limit > 0 {
		budget = min(budget, limit)
	}
	return budget
}

// ownShare is the part of the budget that the daemon keeps to. The rest is for processes that
// unpack layers.
const ownShare = 0.5

// limitMemory makes the garbage collector work harder near the daemon's share of the budget: the
// daemon shall not be killed for garbage. GOMEMLIMIT overrides it. It returns the budget, 0 if that
// cannot be told.
func limitMemory(log *slog.Logger) (budget int64) {
	limit, err := memory.OwnLimit("/")
	if err != nil {
		log.Warn("the memory limit of berth's cgroup is not kept to", "error", err)
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		log.Warn("how much memory the node has is not known", "error", err)
		return limit
	}
	budget = budgetFor(limit, int64(info.Totalram)*int64(info.Unit))
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(int64(ownShare * float64(budget)))
	}
	return budget
}

// unpackerShare is what one process that unpacks a layer may need, beside an unusual window of
// zstd's and a large tree: half of it whatever the layer is, half for its part of workShare.
const unpackerShare = 32 << 20

// unpackersFor returns how many layers may be unpacked at a time with that memory limit: each is unpacked by a
// process of the daemon's cgroup. 0: as many as usual.
func unpackersFor(limit int64) int {
	if limit == 0 {
		return 0
	}
	return int(min(image.DefaultUnpacking, max(1, (1-ownShare)*float64(limit)/unpackerShare)))
}

// aheadShare is the part of what the daemon keeps to that may hold what is fetched ahead of large layers.
const aheadShare = 0.25

// rangeRequestsFor returns how many parts of layers may be fetched at a time with that memory limit, most at most: each is in the daemon's memory.
func rangeRequestsFor(most int, limit int64) int {
	if limit == 0 {
		return most
	}
	return int(min(float64(most), aheadShare*ownShare*float64(limit)/registry.PartSize))
}

// mergeShare is the part of what the daemon keeps to that trees may take while the layers of an image are merged.
const mergeShare = 0.25

// mergeMemoryFor returns how many bytes the daemon may take with that memory limit to merge EROFS layers. 0: as many as usual. An
// image that needs more is kept as directories, where the operator leaves that to berth.
func mergeMemoryFor(limit int64) int64 {
	if limit == 0 {
		return 0
	}
	return min(erofs.MaxMemory, int64(mergeShare*ownShare*float64(limit)))
}

// workShare is the part of what the daemon leaves to others that the processes which unpack layers
// may keep of them, all at a time: with half as much for garbage, and half of their unpackerShare
// that each process needs anyway, that is all of it.
const workShare = 1. / 3

// workMemoryFor returns how many bytes that is with that budget. 0: as many as usual.
func workMemoryFor(budget int64) int64 { return int64(workShare * (1 - ownShare) * float64(budget)) }

// restTime is how long nothing must have been changed before the memory that changes needed is given back: what begins
// soon after another change finds all as that left it.
const restTime = 3 * time.Second
