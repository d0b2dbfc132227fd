package main

import (
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"berth/image"
	"berth/image/erofs"
	"berth/image/registry"
	"berth/internal/memlimit"
)

// ownShare is the part of the memory limit of its cgroup that the daemon keeps to. The rest is for the
// program's own pages, launchers, monitors and CNI plugins, which are in the same cgroup.
const ownShare = 0.5

// limitMemory makes the garbage collector work harder near the cgroup's limit: the daemon shall not be
// killed for garbage. GOMEMLIMIT overrides it. It returns the cgroup's limit, 0 if there is none.
func limitMemory(log *slog.Logger) (limit int64) {
	limit, err := memlimit.Own("/")
	if err != nil {
		log.Warn("the memory limit of berth's cgroup is not kept to", "error", err)
		return 0
	}
	if limit > 0 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(int64(ownShare * float64(limit)))
	}
	return limit
}

// unpackerShare is what one process that unpacks a layer may need, beside an unusual window of zstd's.
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

// treeShare is the part of what the daemon leaves to others that trees of layers may take in the processes that pack them, all at a time: with
// half as much for garbage, and a quarter of their unpackerShare that each process needs without a tree, that is all of it.
const treeShare = 0.5

// treeMemoryFor returns how many bytes that is with that memory limit. 0: as many as usual. Directories need no such memory.
func treeMemoryFor(limit int64) int64 { return int64(treeShare * (1 - ownShare) * float64(limit)) }

// restTime is how long nothing must have been changed before the memory that changes needed is given back: what begins
// soon after another change finds all as that left it.
const restTime = 3 * time.Second
