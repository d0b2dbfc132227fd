package sandbox

import (
	"context"
	"fmt"
	"time"

	"berth/internal/errdefs"
)

// saveSandbox saves the pod's sandbox with its container. The sandbox stops and continues by
// itself. A save that has begun is not cancelled, so nothing is frozen when saveSandbox returns.
func (j *checkpointJob) saveSandbox(ctx context.Context, containers []lockedContainer) error {
	if len(containers) != 1 {
		return errdefs.FailedPrecondition("%d containers share a sandbox; pods with one container can be checkpointed",
			len(containers))
	}
	if err := j.addParts(containers); err != nil {
		return err
	}
	part := j.parts[0]
	if part.Config.GetTty() {
		return errdefs.FailedPrecondition("container %s has a terminal, which a sandbox cannot restore", part.ID)
	}
	if len(part.Anonymous) > 0 {
		return errdefs.FailedPrecondition(
			"container %s has volumes of its image, which are not saved with a sandbox: %s", part.ID, part.Anonymous[0].Path)
	}
	err := j.k.tasks.WithLock(ctx, j.pod.sandbox, "checkpoint", "sandbox of "+j.pod.String(), func() error {
		j.frozenAt = time.Now()
		return j.k.dumper.SaveSandbox(ctx, j.pod.PodSpec, part.ContainerSpec, part.dir)
	})
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("container %s: %w", part.ID, err)
	}
	return j.k.checkRunning(part.lockedContainer) // it may have ended before
}
