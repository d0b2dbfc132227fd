package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"berth/checkpoint/process"
	"berth/checkpoint/process/archive"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/sandbox/stream"
)

// checkpointTimeout limits a checkpoint without a timeout of the client. kubelet's own deadline is
// two minutes.
const checkpointTimeout = 2 * time.Minute

// checkpoints saves running containers and pods.
type checkpoints struct {
	objects    objects
	control    *control
	node       state.Node
	tasks      *task.Runner
	log        *slog.Logger
	unfinished *deferredWork

	launcher Starter
	images   Images
	dumper   Dumper
	streams  *stream.Service
	signing  func() (*archive.Key, error) // the node's key, created when it is first needed

	outputs *process.Outputs // directories of pods' checkpoints
	undoing atomic.Bool      // the checkpoints of an earlier daemon are not undone yet
}

// CheckpointContainer writes an archive of a running container to the file location (KEP-2008). The
// container is frozen meanwhile and goes on afterwards, also after an error. The archive replaces
// an existing file, and has the mode 0600. A zero timeout means checkpointTimeout. A stop of the
// container cancels the checkpoint. If two calls have the same location, the call that ends last
// decides, even if its archive is older. After an error, location is as before, unless the disk has
// failed to record the name of the complete archive.
//
// Errors: InvalidArgument for a location that is not an absolute path. NotFound. FailedPrecondition
// if the container does not run or cannot be checkpointed, with the cause. ResourceExhausted if a
// filesystem is full. Canceled or DeadlineExceeded with ctx or the timeout.
func (k *checkpoints) CheckpointContainer(ctx context.Context, id, location string, timeout time.Duration) error {
	if timeout < 0 {
		return errdefs.InvalidArgument("checkpoint container %s: negative timeout", id)
	}
	if !isFilePath(location) {
		return errdefs.InvalidArgument("checkpoint container %s: the location %q is not the absolute path of a file",
			id, errdefs.Clip(location))
	}
	c, err := k.objects.containers.Find(id)
	if err != nil {
		return err
	}
	p, err := k.objects.pods.Find(c.PodID)
	if err != nil {
		return err
	}
	err = k.checkpoint(ctx, timeout, c.String(), func(ctx context.Context) error {
		return k.checkpointContainer(ctx, p, c, location)
	})
	if err != nil {
		return fmt.Errorf("checkpoint container %s: %w", c.ID, errdefs.Scarce(err))
	}
	return nil
}

// isFilePath reports whether a path is absolute and names a file.
func isFilePath(path string) bool {
	return filepath.IsAbs(path) && !strings.HasSuffix(path, "/") && !strings.ContainsRune(path, 0) &&
		filepath.Base(path) != ".." && filepath.Base(path) != "."
}

// CheckpointPod writes an archive of a pod into output, an existing empty directory (KEP-5823). ids
// are exactly the running containers of the pod. All containers are frozen before the first is
// captured. They continue afterwards, even after an error. After an error the directory is empty.
// options must be empty.
//
// Errors: InvalidArgument for bad requests and unknown options. NotFound. FailedPrecondition if the
// directory is not empty, ids are not the running containers, or a container cannot be
// checkpointed. ResourceExhausted, Canceled and DeadlineExceeded as for CheckpointContainer.
func (k *checkpoints) CheckpointPod(ctx context.Context, podID, output string, ids []string,
	options map[string]string) error {
	for name := range options {
		return errdefs.InvalidArgument("checkpoint pod %s: unknown option %q", podID, errdefs.Clip(name))
	}
	if !filepath.IsAbs(output) || len(ids) == 0 {
		return errdefs.InvalidArgument("checkpoint pod %s: it needs containers and the absolute path of a directory", podID)
	}
	p, err := k.objects.pods.Find(podID)
	if err != nil {
		return err
	}
	containers, err := k.findContainersOf(p, ids)
	if err != nil {
		return err
	}
	err = k.checkpoint(ctx, 0, p.String(), func(ctx context.Context) error {
		return k.checkpointPod(ctx, p, containers, output)
	})
	if err != nil {
		return fmt.Errorf("checkpoint pod %s: %w", p.ID, errdefs.Scarce(err))
	}
	return nil
}

// findContainersOf finds the containers of a request, sorted by ID.
func (k *checkpoints) findContainersOf(p *pod, ids []string) ([]*container, error) {
	var found []*container
	for _, id := range ids {
		c, err := k.objects.containers.Find(id)
		if err != nil {
			return nil, err
		}
		if c.PodID != p.ID {
			return nil, errdefs.InvalidArgument("checkpoint pod %s: container %s is in another pod", p.ID, c.ID)
		}
		if slices.Contains(found, c) {
			return nil, errdefs.InvalidArgument("checkpoint pod %s: container %s twice", p.ID, c.ID)
		}
		found = append(found, c)
	}
	slices.SortFunc(found, func(a, b *container) int { return strings.Compare(a.ID, b.ID) })
	return found, nil
}

// checkpoint runs op. It returns after op's end, so that an error means that everything is undone.
// op is cancelled with ctx, after the timeout, and when berth stops.
func (k *checkpoints) checkpoint(ctx context.Context, timeout time.Duration, object string,
	op func(context.Context) error) error {
	if k.undoing.Load() {
		return errdefs.Unavailable("the checkpoints of an earlier daemon are not undone yet; the log says why")
	}
	if timeout == 0 {
		timeout = checkpointTimeout
	}
	total := min(timeout, math.MaxInt64-task.Timeout) + task.Timeout
	return k.tasks.Detach(context.WithoutCancel(ctx), total, "checkpoint", object, func(detached context.Context) error {
		detached, cancel := context.WithTimeout(detached, timeout)
		defer cancel()
		detached, cancelCause := context.WithCancelCause(detached)
		defer cancelCause(nil)
		defer context.AfterFunc(ctx, func() { cancelCause(context.Cause(ctx)) })()
		err := op(detached)
		if cause := context.Cause(detached); err != nil && cause != nil && errdefs.Code(err) != errdefs.Code(cause) {
			err = fmt.Errorf("%w (%w)", cause, err)
		}
		return err
	})
}

// untilStopped calls op with the locks of the containers, which are sorted by ID. If one of the
// containers is stopped, op and the wait for the locks are cancelled.
func (k *checkpoints) untilStopped(ctx context.Context, containers []*container,
	op func(context.Context, []lockedContainer) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for _, c := range containers {
		running, end := c.dumping.Begin(ctx)
		defer end()
		defer context.AfterFunc(running, func() { cancel(context.Cause(running)) })()
	}
	err := k.lockContainers(ctx, containers, nil, func(locked []lockedContainer) error { return op(ctx, locked) })
	if err != nil && errors.Is(context.Cause(ctx), runtime.ErrStopped) {
		return errdefs.FailedPrecondition("the container was stopped during its checkpoint: %v", err)
	}
	return err
}

// lockContainers calls op while it holds the locks of all containers, which are sorted by ID.
func (k *checkpoints) lockContainers(ctx context.Context, rest []*container, locked []lockedContainer,
	op func([]lockedContainer) error) error {
	if len(rest) == 0 {
		return op(locked)
	}
	return k.control.lockContainer(ctx, rest[0], "checkpoint", func(c lockedContainer) error {
		return k.lockContainers(ctx, rest[1:], append(locked, c), op)
	})
}

// checkpointContainer captures a container in a directory below root, and packs the directory into
// a file.
func (k *checkpoints) checkpointContainer(ctx context.Context, p *pod, c *container, location string) (err error) {
	undo := cleanup.New()
	defer func() { undo.Run(&err) }()
	dir, err := k.checkpointDir(undo)
	if err != nil {
		return err
	}
	job := &checkpointJob{k: k, pod: p, dir: dir}
	if err := job.run(ctx, []*container{c}); err != nil {
		return err
	}
	return process.WriteArchive(ctx, dir, location)
}

// checkpointDir makes a directory for the checkpoint of a container. Its name is new, because the
// removal of an earlier directory can still be in progress.
func (k *checkpoints) checkpointDir(undo *cleanup.List) (*os.File, error) {
	path := filepath.Join(k.node.Checkpoints(), state.NewID())
	// The archive does not need the directory, so a failed removal is retried and is no error.
	undo.Add("remove "+path, func() error {
		if k.removeCheckpointDir(context.Background(), path) != nil {
			k.tasks.RetryInBackground("remove", path, func(ctx context.Context) error {
				return k.removeCheckpointDir(ctx, path)
			})
		}
		return nil
	})
	failpoint.Reach("checkpoint.make-dir")
	err := os.MkdirAll(path, 0o700)
	failpoint.Reach("checkpoint.dir-made")
	if err != nil {
		return nil, fmt.Errorf("make directory for the checkpoint: %w", err)
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	undo.Add("close "+path, dir.Close)
	return dir, nil
}

func (k *checkpoints) removeCheckpointDir(ctx context.Context, path string) error {
	failpoint.Reach("checkpoint.remove-dir")
	err := safefs.RemoveAll(ctx, path)
	failpoint.Reach("checkpoint.dir-removed")
	return err
}

// checkpointPod captures a pod in the client's directory.
func (k *checkpoints) checkpointPod(ctx context.Context, p *pod, containers []*container, output string) (err error) {
	if err := k.checkComplete(p, containers); err != nil { // before anything is written
		return err
	}
	dir, err := process.OpenEmpty(output)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	record, err := k.outputs.Record(dir)
	if err != nil {
		return err
	}
	if err := process.CheckEmpty(dir); err != nil { // another checkpoint may have filled it before the record
		return errors.Join(err, k.outputs.Forget(record))
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("empty "+output, func() error {
		if err := archive.Clear(dir); err != nil {
			k.outputs.Leave(record) // for the next daemon
			return err
		}
		return k.outputs.Forget(record)
	})
	job := &checkpointJob{k: k, pod: p, dir: dir, whole: true}
	if err := job.run(ctx, containers); err != nil {
		return err
	}
	if err := k.outputs.Forget(record); err != nil {
		return err
	}
	undo.Release()
	return nil
}

// checkComplete returns FailedPrecondition unless the containers are all running containers of the
// pod.
func (k *checkpoints) checkComplete(p *pod, containers []*container) error {
	for _, c := range k.objects.containersOf(p.ID) {
		if !slices.Contains(containers, c) && c.running.Load() != nil {
			return errdefs.FailedPrecondition("container %s (%s) runs, but is not in the request", c.ID,
				c.Config.GetMetadata().GetName())
		}
	}
	return nil
}

// checkRunning returns FailedPrecondition unless a checkpoint of the container is possible in
// principle.
func (k *checkpoints) checkRunning(c lockedContainer) error {
	run := c.running.Load()
	if c.Phase() != state.ContainerRunning || run == nil || run.HasEnded() {
		return errdefs.FailedPrecondition("container %s does not run", c.ID)
	}
	if program := k.objects.runtimeOf(c.container); program != nil && !program.Saves() {
		return errdefs.FailedPrecondition(
			"container %s: the runtime of its handler is not berth's own, so it cannot be checkpointed", c.ID)
	}
	return nil
}
