package runtime

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"

	"google.golang.org/grpc/codes"

	"berth/internal/diskusage"
	"berth/internal/errdefs"
)

const (
	// projects is the number of project IDs to draw from.
	projects = 1 << 30
	// maxDrawn limits how many IDs one daemon draws, because XFS keeps a block of 4 KiB for each ID
	// that was ever used.
	maxDrawn = 1 << 16
)

// Quotas assigns a project ID of the filesystem's project quotas to each writable layer. nil stands
// for a filesystem without project quotas.
//
// IDs are random. Outside of user namespaces the owner of a file may assign it to any project
// (FS_IOC_FSSETXATTR). A container that could guess its neighbour's ID could use up the neighbour's
// limit, or cause its eviction.
//
// A recently used ID is not drawn again soon. An ID that still owns files is not drawn, because a
// layer is deleted in the background after its container's removal.
type Quotas struct {
	filesystem *diskusage.Quotas
	limit      uint64 // maximum bytes of a layer; 0: no limit
	first      uint32

	mu sync.Mutex
	// +checklocks:mu
	drawn []uint32 // all drawn IDs; at most maxDrawn, unless more layers exist
	// +checklocks:mu
	next int // index of the next ID to reuse when drawn is full
	// +checklocks:mu
	used map[uint32]bool
}

// OpenQuotas returns the quotas of the filesystem of dir. limit is the maximum size of a layer in
// bytes, or 0 for no limit. A limit on a filesystem without quotas is an error. first is the lowest
// project ID to draw.
func OpenQuotas(dir string, limit uint64, first uint32) (*Quotas, error) {
	filesystem, err := diskusage.OpenQuotas(dir)
	if errors.Is(err, diskusage.ErrNoQuotas) && limit == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, errdefs.FailedPrecondition("disk.writable_layer_limit cannot be enforced: %w", err)
	}
	return &Quotas{filesystem: filesystem, limit: limit, first: first, used: map[uint32]bool{}}, nil
}

func (q *Quotas) Close() error {
	if q == nil {
		return nil
	}
	return q.filesystem.Close()
}

// Keep marks the project of an earlier daemon's layer as used.
func (q *Quotas) Keep(project uint32) {
	if q == nil || project == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.used[project] = true
}

// Take reserves a project that has no files. The caller calls Release. If there are no quotas, it
// returns 0.
func (q *Quotas) Take() (uint32, error) {
	if q == nil {
		return 0, nil
	}
	const tries = 1000
	for range tries {
		project := q.reserve()
		usage, err := q.filesystem.Usage(project)
		if err == nil && usage == (diskusage.Usage{}) {
			return project, nil
		}
		q.Release(project)
		if err != nil {
			return 0, err
		}
	}
	return 0, errdefs.New(codes.ResourceExhausted,
		"%d random project IDs from %d on all have files: another program uses this range; "+
			"change disk.writable_layer_projects", tries, q.first)
}

// reserve returns a free project ID. After maxDrawn draws it reuses the oldest ID.
func (q *Quotas) reserve() uint32 {
	q.mu.Lock()
	defer q.mu.Unlock()
	for range q.drawn {
		if len(q.drawn) < maxDrawn {
			break
		}
		project := q.drawn[q.next]
		q.next = (q.next + 1) % len(q.drawn)
		if !q.used[project] {
			q.used[project] = true
			return project
		}
	}
	return q.draw()
}

// draw returns a random unused ID. The caller holds mu.
//
// +checklocks:q.mu
func (q *Quotas) draw() uint32 {
	for {
		project := q.first + rand.Uint32N(projects) // seeded by the kernel and unpredictable
		if !q.used[project] {
			q.used[project] = true
			q.drawn = append(q.drawn, project)
			return project
		}
	}
}

// Release frees the project of a removed container.
func (q *Quotas) Release(project uint32) {
	if q == nil || project == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.used, project)
}

// Clear removes the limit of a project whose layer is being removed.
func (q *Quotas) Clear(project uint32) error {
	if q == nil || project == 0 {
		return nil
	}
	return q.filesystem.SetLimit(project, 0)
}

// Usage returns the usage of a project, including deleted files that are still open. ok is false if
// it is unknown.
func (q *Quotas) Usage(project uint32) (usage diskusage.Usage, ok bool, err error) {
	if q == nil || project == 0 {
		return usage, false, nil
	}
	found, err := q.filesystem.Usage(project)
	return diskusage.Usage{Bytes: found.Bytes, Inodes: found.Inodes}, err == nil, err
}

// assign assigns dir and its future contents to the project, and sets the configured limit.
func (q *Quotas) assign(dir string, project uint32) error {
	if q == nil || project == 0 {
		return nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := q.filesystem.SetLimit(project, q.limit); err != nil {
		return err
	}
	if err := diskusage.AssignProject(f, project); err != nil {
		return fmt.Errorf("assign quota project: %w", err)
	}
	return nil
}
