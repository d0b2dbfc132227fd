package state

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/internal/task"
)

// Trash removes folder trees that may be large.
type Trash struct {
	dir   string
	old   string // where version 0.1.0 had it
	tasks *task.Runner
}

// NewTrash returns the trash of d, which is emptied in the background.
func NewTrash(d Dirs, tasks *task.Runner) *Trash {
	return &Trash{dir: d.Trash(), old: filepath.Join(d.Root, "trash"), tasks: tasks}
}

// Discard removes a folder tree that may be large: at once from its place, then
// in the background, until that succeeds, from the trash. What is left of it, the next daemon removes.
func (t *Trash) Discard(dir string) error {
	place := filepath.Join(t.dir, rand.Text())
	failpoint.Reach("rootfs.discard")
	err := os.Rename(dir, place)
	failpoint.Reach("rootfs.discarded")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("move %s to the trash: %w", dir, err)
	}
	t.empty(place)
	return nil
}

func (t *Trash) empty(dir string) {
	t.tasks.InBackground("remove from the trash", dir, func(ctx context.Context) error {
		failpoint.Reach("rootfs.delete")
		if err := safefs.RemoveAll(ctx, dir); err != nil {
			return fmt.Errorf("remove from the trash: %w", err)
		}
		failpoint.Reach("rootfs.deleted")
		return nil
	})
}

// Sweep removes what an earlier daemon had no time to.
func (t *Trash) Sweep() error {
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return fmt.Errorf("read the trash: %w", err)
	}
	for _, e := range entries {
		t.empty(filepath.Join(t.dir, e.Name()))
	}
	if _, err := os.Lstat(t.old); err == nil {
		t.empty(t.old)
	}
	return nil
}
