package image

import (
	"cmp"
	"sync"

	"berth/image/erofs"
)

// leastTree is what each tree may take, where all of them may take so much for each. 18,000 files take so much.
const leastTree = 8 << 20

// treeMemory is what trees of layers may take of the memory, each in the process that packs the layer or that makes a directory of what was
// packed. How much a tree takes shows when it is read, so it gets a share before: the least, which is kept for as many as there
// can be at a time, and half of what is free of the rest, but no more than is of use. Nobody waits: a share is held for as long as a registry takes
// to send the layer.
type treeMemory struct {
	least, most int64
	mu          sync.Mutex // guards free
	free        int64      // of the rest
}

// newTreeMemory is all of the memory for so many trees at a time, which are merged with so much (Config.MergeMemory). 0: each may take what
// its layer's limit says.
func newTreeMemory(all, merging int64, trees int) *treeMemory {
	if all <= 0 {
		return nil
	}
	least := min(leastTree, all/int64(trees))
	most := cmp.Or(merging, erofs.MaxMemory) * 5 / 4 // what takes more can't be merged; only while it is packed what is replaced counts, too
	return &treeMemory{least: least, most: max(least, most), free: all - least*int64(trees)}
}

// share is what the tree of a layer gets that may take so many bytes. The caller gives it back.
func (m *treeMemory) share(limit int64) (bytes int64, giveBack func()) {
	if m == nil {
		return limit, func() {}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	more := max(0, min(m.free/2, min(m.most, limit)-m.least))
	m.free -= more
	return min(m.least+more, limit), func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.free += more
	}
}
