package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	goruntime "runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/process"
	"berth/checkpoint/process/archive"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/sandbox/runtime"
)

const (
	// execTimeout is how long execs in the containers may take to end (KEP-5823).
	execTimeout = time.Second
	// freezeSlack is how much longer than the checkpoint's deadline a monitor keeps its container
	// frozen. Usually berth thaws the container at the deadline. The monitor's limit counts if
	// berth hangs.
	freezeSlack = 5 * time.Second
)

// checkpointJob is a checkpoint in progress. It holds the locks of the containers until they are
// captured and described. It does not hold them while it hashes and writes, because an exit is
// published under the lock.
type checkpointJob struct {
	k     *checkpoints
	pod   *pod
	dir   *os.File // the archive
	whole bool     // an archive of the pod, otherwise of one container

	parts    []*checkpointPart
	early    *archive.Early // nil: nothing is hashed early
	hashing  sync.WaitGroup // uses early
	frozenAt time.Time
	cancel   context.CancelCauseFunc
	watches  sync.WaitGroup
}

// checkpointPart is one container of a checkpoint.
type checkpointPart struct {
	lockedContainer
	name   string // its directory in the archive
	dir    *os.File
	dump   runtime.Dump // nil: the pod's sandbox is saved instead
	frozen runtime.Frozen
}

// run captures the containers and writes the whole archive. They continue as soon as they are
// captured. The archive of a pod is on the disk when run returns. After an error the caller removes
// the files.
func (j *checkpointJob) run(ctx context.Context, containers []*container) error {
	defer j.close()
	key, err := j.k.signing()
	if err != nil {
		return err
	}
	manifest, err := j.recordLocked(ctx, containers)
	if err != nil {
		return err
	}
	return archive.Seal(ctx, j.dir, manifest, key, j.early, j.whole) // an archive of a container is not synced, because it is packed into a file, which is synced
}

// recordLocked captures and describes the containers while it holds their locks.
func (j *checkpointJob) recordLocked(ctx context.Context,
	containers []*container) (manifest *archive.Manifest, err error) {
	err = j.k.untilStopped(ctx, containers, func(ctx context.Context, locked []lockedContainer) (err error) {
		manifest, err = j.record(ctx, locked)
		return err
	})
	return manifest, err
}

// record is recordLocked after the locks were taken.
func (j *checkpointJob) record(ctx context.Context, containers []lockedContainer) (*archive.Manifest, error) {
	ctx, j.cancel = context.WithCancelCause(ctx)
	defer j.cancel(nil)
	for _, c := range containers {
		if err := j.k.checkRunning(c); err != nil {
			return nil, err
		}
	}
	release, err := j.holdExecs(ctx, containers)
	defer release()
	if err != nil {
		return nil, err
	}
	capture := j.capture
	if j.pod.Sandboxed() {
		capture = j.saveSandbox
	}
	err = capture(ctx, containers)
	j.hashing.Wait() // not before the containers run again
	release()
	if err != nil {
		return nil, err
	}
	return j.describe(ctx)
}

// holdExecs keeps execs from starting in the containers until release is called.
func (j *checkpointJob) holdExecs(ctx context.Context, containers []lockedContainer) (release func(), err error) {
	var held []func()
	release = sync.OnceFunc(func() {
		for _, end := range held {
			end()
		}
	})
	if j.k.streams == nil { // tests of the manager have no streams
		return release, nil
	}
	var mu sync.Mutex // guards held until the end of the group
	group, ctx := errgroup.WithContext(ctx)
	for _, c := range containers {
		group.Go(func() error {
			end, err := j.k.streams.Hold(ctx, c.ID, execTimeout)
			if err != nil {
				return fmt.Errorf("container %s: %w", c.ID, err)
			}
			mu.Lock()
			defer mu.Unlock()
			held = append(held, end)
			return nil
		})
	}
	return release, group.Wait()
}

// capture prepares, freezes and dumps all containers. On success the containers continue before
// CRIU's processes have ended. After an error CRIU must end first, because it could freeze a
// container again.
func (j *checkpointJob) capture(ctx context.Context, containers []lockedContainer) (err error) {
	defer j.watches.Wait()
	if err := j.prepare(ctx, containers); err != nil {
		return errors.Join(err, j.endDumps())
	}
	err = j.freeze(ctx)
	if err == nil && j.whole { // a container may have started meanwhile
		err = j.k.checkComplete(j.pod, unlocked(containers))
	}
	if err == nil {
		j.frozenAt = time.Now()
		err = j.copyAll(ctx)
	}
	if err != nil {
		err = errors.Join(err, j.endDumps())
		_ = j.thaw() // the containers may have ended; thawDirectly reports containers that stay frozen
		return errors.Join(err, j.thawDirectly())
	}
	if err = errors.Join(j.thaw(), j.endDumps()); err != nil {
		return errors.Join(err, j.thawDirectly())
	}
	return nil
}

func unlocked(containers []lockedContainer) (list []*container) {
	for _, c := range containers {
		list = append(list, c.container)
	}
	return list
}

// each calls f for all parts in parallel. The first error ends the context of the other calls.
func (j *checkpointJob) each(ctx context.Context, f func(context.Context, *checkpointPart) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, part := range j.parts {
		group.Go(func() error {
			return j.k.tasks.Guard("checkpoint", part.String(), func() error {
				if err := f(ctx, part); err != nil {
					return fmt.Errorf("container %s: %w", part.ID, err)
				}
				return nil
			})
		})
	}
	return group.Wait()
}

// prepare makes the containers' directories and starts their CRIUs.
func (j *checkpointJob) prepare(ctx context.Context, containers []lockedContainer) error {
	if err := j.addParts(containers); err != nil {
		return err
	}
	return j.each(ctx, func(ctx context.Context, part *checkpointPart) (err error) {
		part.dump, err = j.k.dumper.Prepare(ctx, part.ID, part.dir)
		return err
	})
}

// addParts makes and opens the containers' directories.
func (j *checkpointJob) addParts(containers []lockedContainer) error {
	for _, c := range containers {
		part := &checkpointPart{lockedContainer: c}
		if j.whole {
			part.name = c.Config.GetMetadata().GetName()
			if err := archive.CheckName(part.name); err != nil {
				return err
			}
			if slices.ContainsFunc(j.parts, func(other *checkpointPart) bool { return other.name == part.name }) {
				return errdefs.FailedPrecondition("two containers have the name %s", part.name)
			}
		}
		j.parts = append(j.parts, part)
		if err := j.openPart(part); err != nil {
			return err
		}
	}
	return nil
}

// openPart makes and opens the directory of a container.
func (j *checkpointJob) openPart(part *checkpointPart) (err error) {
	if part.name == "" {
		part.dir, err = safefs.OpenRoot(j.dir.Name())
		return err
	}
	top, err := safefs.OpenDir(j.dir, "")
	if err != nil {
		return err
	}
	defer top.Close() // Close of a directory loses no changes
	failpoint.Reach("checkpoint.make-part")
	if err := top.Mkdir(part.name, 0o700); err != nil {
		return err
	}
	failpoint.Reach("checkpoint.part-made")
	part.dir, err = safefs.Open(j.dir, part.name, os.O_RDONLY, 0)
	return err
}

// freeze freezes all containers. It returns when all are frozen, or after the first error.
func (j *checkpointJob) freeze(ctx context.Context) error {
	timeout := freezeSlack
	if deadline, ok := ctx.Deadline(); ok {
		timeout += max(time.Until(deadline), 0)
	}
	return j.each(ctx, func(ctx context.Context, part *checkpointPart) (err error) {
		failpoint.Reach("checkpoint.freeze")
		part.frozen, err = j.k.dumper.Freeze(ctx, part.ID, part.CgroupsPath, timeout)
		failpoint.Reach("checkpoint.frozen")
		return err
	})
}

// copyAll dumps the processes and copies the files of all containers. The loss of a monitor, or the
// end of a container, ends the checkpoint, so that the other containers do not stay frozen in vain.
func (j *checkpointJob) copyAll(ctx context.Context) error {
	done := make(chan struct{})
	defer close(done)
	for _, part := range j.parts {
		lost := part.frozen.Lost()
		j.watches.Go(func() {
			select {
			case <-lost:
				j.cancel(errdefs.Unavailable("container %s has ended, or its monitor", part.ID))
			case <-done:
			}
		})
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		defer j.hashEarly(ctx)()
		return j.each(ctx, func(ctx context.Context, p *checkpointPart) error { return p.dump.Run(ctx) })
	})
	group.Go(func() error { return j.each(ctx, j.copyLayer) })
	group.Go(func() error { return j.each(ctx, j.copyVolumes) })
	group.Go(func() error { return j.copyShm(ctx) })
	err := group.Wait()
	if cause := context.Cause(ctx); err != nil && cause != nil && errdefs.Code(cause) == codes.Unavailable {
		return cause
	}
	return err
}

// hashEarly hashes the processes' memory while CRIU writes it, until stop is called. Each CRIU uses
// a processor. If no processor is idle, the rest is hashed when the containers run again.
func (j *checkpointJob) hashEarly(ctx context.Context) (stop func()) {
	if goruntime.GOMAXPROCS(0) <= len(j.parts) {
		return func() {}
	}
	var names []string
	for _, part := range j.parts {
		names = append(names, part.name)
	}
	j.early = archive.NewEarly(j.dir)
	ctx, stop = context.WithCancel(ctx)
	j.hashing.Go(func() { j.early.Run(ctx, names...) })
	return stop
}

// copyLayer copies a container's writable layer.
func (j *checkpointJob) copyLayer(ctx context.Context, part *checkpointPart) error {
	return process.CopyLayer(ctx, path.Join(j.k.node.Writable(part.ID), "upper"), part.dir)
}

// copyVolumes copies a container's anonymous volumes.
func (j *checkpointJob) copyVolumes(ctx context.Context, part *checkpointPart) error {
	if len(part.Anonymous) == 0 {
		return nil
	}
	return process.CopyTree(ctx, j.k.node.Volumes(part.ID), part.dir, archive.VolumesFile)
}

// copyShm copies the pod's /dev/shm, unless the pod uses the node's.
func (j *checkpointJob) copyShm(ctx context.Context) error {
	err := process.CopyTree(ctx, j.k.node.Shm(j.pod.ID), j.dir, archive.ShmFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// thaw thaws all containers in parallel. An error means that a container ran before everything was
// captured, or that its monitor does not answer.
func (j *checkpointJob) thaw() error {
	return j.eachFrozen(func(part *checkpointPart) error { return part.frozen.Thaw() })
}

// thawDirectly thaws all containers and does not ask their monitors. CRIU has ended. It may have
// frozen a container after the monitor's last thaw, and a monitor stops thawing when its limit is
// over.
func (j *checkpointJob) thawDirectly() error {
	return j.eachFrozen(func(part *checkpointPart) error { return j.k.dumper.Thaw(part.CgroupsPath) })
}

// eachFrozen calls f for all parts that were frozen, in parallel.
func (j *checkpointJob) eachFrozen(f func(*checkpointPart) error) error {
	var thawing sync.WaitGroup
	errs := make([]error, len(j.parts))
	for i, part := range j.parts {
		if part.frozen == nil {
			continue
		}
		thawing.Go(func() {
			if err := f(part); err != nil {
				errs[i] = fmt.Errorf("container %s: %w", part.ID, err)
			}
		})
	}
	thawing.Wait()
	return errors.Join(errs...)
}

// endDumps ends all CRIUs in parallel and waits for their end.
func (j *checkpointJob) endDumps() error {
	var ending sync.WaitGroup
	errs := make([]error, len(j.parts))
	for i, part := range j.parts {
		if part.dump != nil {
			ending.Go(func() { errs[i] = part.dump.Close() })
		}
	}
	ending.Wait()
	return errors.Join(errs...)
}

func (j *checkpointJob) close() {
	for _, part := range j.parts {
		if part.dir != nil {
			_ = part.dir.Close() // Close of a directory loses no changes
		}
	}
	if j.early != nil {
		j.early.Close()
	}
}

// mounted returns whether the container has a mount at a path. Only CRIU knows which mounts a
// process has unmounted.
func (p *checkpointPart) mounted(path string) bool {
	return p.dump == nil || slices.Contains(p.dump.Info().BindMounts, path)
}
