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
	"berth/internal/projectquota"
)

const (
	// projects is how many project IDs Quotas draws from.
	projects = 1 << 30
	// maxDrawn is how many of them one daemon uses. XFS keeps a block of 4 KiB for each ID that was
	// ever used.
	maxDrawn = 1 << 16
)

// Quotas gives each writable layer a project ID of its filesystem's project quotas. nil stands for
// a filesystem without them.
//
// IDs are random. Outside of user namespaces the owner of a file may assign it to any project
// (FS_IOC_FSSETXATTR). A container that could guess its neighbour's ID could use up the neighbour's
// limit, or cause its eviction.
//
// A recently used ID is not drawn again soon. An ID that still owns files is not drawn either: a
// layer is deleted in the background after its container's removal.
type Quotas struct {
	filesystem *projectquota.Filesystem
	limit      uint64 // bytes of a layer; 0: none
	first      uint32

	mu    sync.Mutex // guards the fields below
	drawn []uint32   // maxDrawn, unless more layers than that exist at a time
	next  int        // index of the ID of a full drawn that is used next
	used  map[uint32]bool
}

// OpenQuotas returns the quotas of the filesystem of dir. limit is the size of a layer in bytes; 0:
// none. A limit on a filesystem without quotas is an error. first is the lowest project ID to draw.
func OpenQuotas(dir string, limit uint64, first uint32) (*Quotas, error) {
	filesystem, err := projectquota.Open(dir)
	if errors.Is(err, projectquota.ErrUnsupported) && limit == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, errdefs.FailedPrecondition("writable_layer_limit can't be kept: %w", err)
	}
	return &Quotas{filesystem: filesystem, limit: limit, first: first, used: map[uint32]bool{}}, nil
}

// Close ends their use.
func (q *Quotas) Close() error {
	if q == nil {
		return nil
	}
	return q.filesystem.Close()
}

// Keep notes that a layer that an earlier daemon made has that project.
func (q *Quotas) Keep(project uint32) {
	if q == nil || project == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.used[project] = true
}

// Take returns a project that nothing belongs to, 0 without quotas. It is the caller's until
// Release.
func (q *Quotas) Take() (uint32, error) {
	if q == nil {
		return 0, nil
	}
	const tries = 1000
	for range tries {
		project := q.reserve()
		usage, err := q.filesystem.Usage(project)
		if err == nil && usage == (projectquota.Usage{}) {
			return project, nil
		}
		q.Release(project)
		if err != nil {
			return 0, err
		}
	}
	return 0, errdefs.New(codes.ResourceExhausted,
		"each of %d project IDs drawn from %d on has files: another program uses them, see writable_layer_projects", tries, q.first)
}

// reserve returns a free project ID. After maxDrawn draws it reuses the ID that was drawn longest
// ago.
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

// draw returns a random ID that no container has: far fewer are used than there are. It needs mu.
func (q *Quotas) draw() uint32 {
	for {
		project := q.first + rand.Uint32N(projects) // seeded by the kernel, and not predictable
		if !q.used[project] {
			q.used[project] = true
			q.drawn = append(q.drawn, project)
			return project
		}
	}
}

// Release gives a project back whose container is removed.
func (q *Quotas) Release(project uint32) {
	if q == nil || project == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.used, project)
}

// Clear takes the limit off a project whose layer is being removed.
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

// assign makes dir, and what will be made in it, the project's, with the limit of this daemon's
// configuration.
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
	if err := projectquota.Assign(f, project); err != nil {
		return fmt.Errorf("quota: %w", err)
	}
	return nil
}
