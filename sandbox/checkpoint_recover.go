package sandbox

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/sandbox/state"
)

// undoLeft undoes the checkpoints of an earlier daemon before clients can use their directories
// again. After an error it retries in the background, because a CRIU that hangs in the kernel must
// not prevent the daemon's start. Until it succeeds, new checkpoints are refused, so it cannot undo
// a new checkpoint.
func (k *checkpoints) undoLeft(ctx context.Context) error {
	damaged, err := k.outputs.Load()
	logDamaged(k.log, "checkpoint", damaged)
	if err != nil {
		return err
	}
	k.undoing.Store(true)
	err = k.undoCheckpoints(ctx)
	if err != nil {
		k.log.Error("undo the checkpoints of an earlier daemon; it is retried, and new checkpoints are refused until then",
			"error", err)
		k.unfinished.Later("undo", "checkpoints", k.undoCheckpoints)
	}
	return nil
}

// undoCheckpoints ends the CRIUs of an earlier daemon and removes the files of its checkpoints.
func (k *checkpoints) undoCheckpoints(ctx context.Context) error {
	err := k.dumper.EndLeft(func(id string) string {
		if c, known := k.objects.containers.Get(id); known {
			return c.CgroupsPath
		}
		return ""
	})
	if err != nil {
		return err
	}
	err = errors.Join(k.removeLeftCheckpoints(ctx), k.outputs.EmptyLeft())
	if err == nil {
		k.undoing.Store(false)
	}
	return err
}

// removeLeftCheckpoints removes the directories of unfinished checkpoints of containers.
func (k *checkpoints) removeLeftCheckpoints(ctx context.Context) error {
	entries, err := os.ReadDir(k.node.Checkpoints())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || !state.IsID(e.Name()) {
			continue
		}
		failpoint.Reach("checkpoint.remove-left")
		err = errors.Join(err, safefs.RemoveAll(ctx, filepath.Join(k.node.Checkpoints(), e.Name())))
		failpoint.Reach("checkpoint.left-removed")
	}
	return err
}
