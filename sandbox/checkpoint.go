package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/checkpoint/archive"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
)

// checkpointTime limits a checkpoint without a timeout of the client. kubelet's own deadline is two
// minutes.
const checkpointTime = 2 * time.Minute

// CheckpointContainer writes an archive of a running container to the file location (KEP-2008). The
// container is frozen meanwhile and goes on afterwards, also after an error. The archive replaces an
// existing file, and has the mode 0600. A zero timeout means checkpointTime. A stop of the container
// cancels the checkpoint.
//
// Errors: InvalidArgument for a location that is not an absolute path. NotFound. FailedPrecondition if
// the container does not run or cannot be checkpointed, with the cause. ResourceExhausted if a
// filesystem is full. Canceled or DeadlineExceeded with ctx or the timeout.
func (m *Manager) CheckpointContainer(ctx context.Context, id, location string, timeout time.Duration) error {
	if timeout < 0 {
		return errdefs.InvalidArgument("checkpoint container %s: negative timeout", id)
	}
	if !isFilePath(location) {
		return errdefs.InvalidArgument("checkpoint container %s: the location %q is not the absolute path of a file",
			id, errdefs.Clip(location))
	}
	c, err := m.containers.Find(id)
	if err != nil {
		return err
	}
	p, err := m.pods.Find(c.PodID)
	if err != nil {
		return err
	}
	list := []*container{c}
	err = m.checkpoint(ctx, timeout, c.String(), list, func(ctx context.Context, locked []lockedContainer) error {
		return m.checkpointContainer(ctx, p, locked[0], location)
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

// CheckpointPod writes an archive of a pod into output, an existing empty directory (KEP-5823). ids are
// exactly the running containers of the pod. All containers are frozen before the first is captured, and
// go on afterwards, also after an error. After an error the directory is empty. options must be empty.
//
// Errors: InvalidArgument for bad requests and unknown options. NotFound. FailedPrecondition if the
// directory is not empty, ids are not the running containers, or a container cannot be checkpointed.
// ResourceExhausted, Canceled and DeadlineExceeded as CheckpointContainer.
func (m *Manager) CheckpointPod(ctx context.Context, podID, output string, ids []string,
	options map[string]string) error {
	for name := range options {
		return errdefs.InvalidArgument("checkpoint pod %s: unknown option %q", podID, errdefs.Clip(name))
	}
	if !filepath.IsAbs(output) || len(ids) == 0 {
		return errdefs.InvalidArgument("checkpoint pod %s: it needs containers and the absolute path of a directory", podID)
	}
	p, err := m.pods.Find(podID)
	if err != nil {
		return err
	}
	containers, err := m.findContainersOf(p, ids)
	if err != nil {
		return err
	}
	err = m.checkpoint(ctx, 0, p.String(), containers, func(ctx context.Context, locked []lockedContainer) error {
		return m.checkpointPod(ctx, p, locked, output)
	})
	if err != nil {
		return fmt.Errorf("checkpoint pod %s: %w", p.ID, errdefs.Scarce(err))
	}
	return nil
}

// findContainersOf finds the containers of a request, sorted by ID.
func (m *Manager) findContainersOf(p *pod, ids []string) ([]*container, error) {
	var found []*container
	for _, id := range ids {
		c, err := m.containers.Find(id)
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

// checkpoint runs op with the locks of the containers, which are sorted by ID. It returns after op's end,
// so that an error means that everything is undone. op is cancelled with ctx, after the timeout, by a stop
// of a container, and when berth stops.
func (m *Manager) checkpoint(ctx context.Context, timeout time.Duration, object string, containers []*container,
	op func(context.Context, []lockedContainer) error) error {
	if m.undoing.Load() {
		return errdefs.Unavailable("the checkpoints of an earlier daemon are not undone yet; the log says why")
	}
	if timeout == 0 {
		timeout = checkpointTime
	}
	limit := min(timeout, math.MaxInt64-task.Limit) + task.Limit
	return m.tasks.Detach(context.WithoutCancel(ctx), limit, "checkpoint", object, func(detached context.Context) error {
		detached, cancel := context.WithTimeout(detached, timeout)
		defer cancel()
		detached, cancelCause := context.WithCancelCause(detached)
		defer cancelCause(nil)
		defer context.AfterFunc(ctx, func() { cancelCause(context.Cause(ctx)) })()
		err := m.untilStopped(detached, containers, op)
		if cause := context.Cause(detached); err != nil && cause != nil && errdefs.Code(err) != errdefs.Code(cause) {
			err = fmt.Errorf("%w (%w)", cause, err)
		}
		return err
	})
}

// untilStopped calls op with the locks of the containers. A stop of one of them cancels op, and the wait for
// the locks.
func (m *Manager) untilStopped(ctx context.Context, containers []*container,
	op func(context.Context, []lockedContainer) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for _, c := range containers {
		running, end := c.dumping.Begin(ctx)
		defer end()
		defer context.AfterFunc(running, func() { cancel(context.Cause(running)) })()
	}
	err := m.lockContainers(ctx, containers, nil, func(locked []lockedContainer) error { return op(ctx, locked) })
	if err != nil && errors.Is(context.Cause(ctx), runtime.ErrStopped) {
		return errdefs.FailedPrecondition("the container was stopped during its checkpoint: %v", err)
	}
	return err
}

// lockContainers calls op while it holds the locks of all containers, which are sorted by ID.
func (m *Manager) lockContainers(ctx context.Context, rest []*container, locked []lockedContainer,
	op func([]lockedContainer) error) error {
	if len(rest) == 0 {
		return op(locked)
	}
	return m.lockContainer(ctx, rest[0], "checkpoint", func(c lockedContainer) error {
		return m.lockContainers(ctx, rest[1:], append(locked, c), op)
	})
}

// checkpointContainer captures a container in a directory of berth's own and packs that into a file.
func (m *Manager) checkpointContainer(ctx context.Context, p *pod, c lockedContainer, location string) (err error) {
	undo := cleanup.New()
	defer func() { undo.Run(&err) }()
	dir, err := m.checkpointDir(c.ID, undo)
	if err != nil {
		return err
	}
	job := &checkpointJob{m: m, pod: p, dir: dir}
	if err := job.run(ctx, []lockedContainer{c}); err != nil {
		return err
	}
	return writeArchive(ctx, dir, location)
}

// checkpointDir makes the directory for the checkpoint of a container.
func (m *Manager) checkpointDir(id string, undo *cleanup.List) (*os.File, error) {
	path := filepath.Join(m.dirs.Checkpoints(), id)
	// The archive is complete without it, so a failed removal is retried and is no error.
	undo.Add("remove "+path, func() error {
		if m.removeCheckpointDir(context.Background(), path) != nil {
			m.tasks.RetryInBackground("remove", path, func(ctx context.Context) error {
				return m.removeCheckpointDir(ctx, path)
			})
		}
		return nil
	})
	failpoint.Reach("checkpoint.make-dir")
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make directory for the checkpoint: %w", err)
	}
	failpoint.Reach("checkpoint.dir-made")
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	undo.Add("close "+path, dir.Close)
	return dir, nil
}

func (m *Manager) removeCheckpointDir(ctx context.Context, path string) error {
	failpoint.Reach("checkpoint.remove-dir")
	err := safefs.RemoveAll(ctx, path)
	failpoint.Reach("checkpoint.dir-removed")
	return err
}

// writeArchive writes the archive in dir to a new file, which then replaces location, on the disk. A daemon
// that dies meanwhile leaves no file. A symbolic link at location is replaced and not followed.
func writeArchive(ctx context.Context, dir *os.File, location string) (err error) {
	parent, err := os.Open(filepath.Dir(location))
	if err != nil {
		return locationError(err)
	}
	defer parent.Close() // Sync has told its errors
	failpoint.Reach("checkpoint.make-archive")
	fd, err := unix.Openat(int(parent.Fd()), ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	failpoint.Reach("checkpoint.archive-made")
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) { // NFS and FUSE, for example
		return writeNamedArchive(ctx, dir, parent, filepath.Base(location))
	}
	if err != nil {
		return locationError(fmt.Errorf("make a file in %s: %w", parent.Name(), os.NewSyscallError("openat", err)))
	}
	file := os.NewFile(uintptr(fd), location)
	err = archive.Pack(ctx, dir, file)
	if err == nil {
		err = file.Sync()
	}
	if err == nil {
		err = linkFile(file, parent, filepath.Base(location))
	}
	if err == nil {
		err = parent.Sync()
	}
	return errors.Join(err, file.Close())
}

// writeNamedArchive is writeArchive for a filesystem without O_TMPFILE. A daemon that dies meanwhile
// leaves a hidden file.
func writeNamedArchive(ctx context.Context, dir, parent *os.File, name string) error {
	temporary := "." + state.NewID()[:16] + ".tmp"
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_CLOEXEC
	failpoint.Reach("checkpoint.make-named")
	fd, err := unix.Openat(int(parent.Fd()), temporary, flags, 0o600)
	failpoint.Reach("checkpoint.named-made")
	if err != nil {
		return fmt.Errorf("make a file in %s: %w", parent.Name(), os.NewSyscallError("openat", err))
	}
	file := os.NewFile(uintptr(fd), temporary)
	err = archive.Pack(ctx, dir, file)
	if err == nil {
		err = file.Sync()
	}
	err = errors.Join(err, file.Close())
	if err == nil {
		failpoint.Reach("checkpoint.rename-named")
		err = os.NewSyscallError("renameat", unix.Renameat(int(parent.Fd()), temporary, int(parent.Fd()), name))
		failpoint.Reach("checkpoint.named-renamed")
	}
	if err != nil {
		failpoint.Reach("checkpoint.remove-named")
		err = errors.Join(err, os.NewSyscallError("unlinkat", unix.Unlinkat(int(parent.Fd()), temporary, 0)))
		failpoint.Reach("checkpoint.named-removed")
		return err
	}
	return parent.Sync()
}

// locationError gives an error of the client's path a code.
func locationError(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return errdefs.FailedPrecondition("%w", err)
	}
	return err
}

// linkFile gives a file without a name its name in a directory, in place of an existing file.
func linkFile(file, dir *os.File, name string) error {
	source := fmt.Sprintf("/proc/self/fd/%d", file.Fd())
	failpoint.Reach("checkpoint.link-archive")
	err := unix.Linkat(unix.AT_FDCWD, source, int(dir.Fd()), name, unix.AT_SYMLINK_FOLLOW)
	failpoint.Reach("checkpoint.archive-linked")
	if !errors.Is(err, unix.EEXIST) {
		return os.NewSyscallError("linkat", err)
	}
	temporary := "." + state.NewID()[:16] + ".tmp"
	failpoint.Reach("checkpoint.link-temporary")
	if err := unix.Linkat(unix.AT_FDCWD, source, int(dir.Fd()), temporary, unix.AT_SYMLINK_FOLLOW); err != nil {
		return os.NewSyscallError("linkat", err)
	}
	failpoint.Reach("checkpoint.replace-archive")
	err = unix.Renameat(int(dir.Fd()), temporary, int(dir.Fd()), name)
	failpoint.Reach("checkpoint.archive-replaced")
	if err == nil {
		return nil
	}
	failpoint.Reach("checkpoint.remove-temporary")
	removeErr := unix.Unlinkat(int(dir.Fd()), temporary, 0)
	failpoint.Reach("checkpoint.temporary-removed")
	return errors.Join(os.NewSyscallError("renameat", err), removeErr)
}

// checkpointPod captures a pod in the client's directory.
func (m *Manager) checkpointPod(ctx context.Context, p *pod, containers []lockedContainer, output string) (err error) {
	if err := m.checkComplete(p, containers); err != nil {
		return err
	}
	dir, err := openEmpty(output)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("empty "+output, func() error {
		if err := archive.Clear(dir); err != nil {
			return err // the record stays for the next daemon
		}
		return m.forgetOutput(p.ID)
	})
	if err := m.recordOutput(p.ID, dir); err != nil {
		return err
	}
	job := &checkpointJob{m: m, pod: p, dir: dir, whole: true}
	if err := job.run(ctx, containers); err != nil {
		return err
	}
	undo.Release()
	return m.forgetOutput(p.ID)
}

// checkComplete returns FailedPrecondition unless the containers are all running containers of the pod.
func (m *Manager) checkComplete(p *pod, containers []lockedContainer) error {
	for _, c := range m.containersOf(p.ID) {
		selected := slices.ContainsFunc(containers, func(l lockedContainer) bool { return l.ID == c.ID })
		if !selected && c.running.Load() != nil {
			return errdefs.FailedPrecondition("container %s (%s) runs, but is not in the request", c.ID,
				c.Config.GetMetadata().GetName())
		}
	}
	return nil
}

// openEmpty opens an existing empty directory. A symbolic link at its place is refused.
func openEmpty(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errdefs.FailedPrecondition("open the output directory %s: %w", path, os.NewSyscallError("open", err))
	}
	dir := os.NewFile(uintptr(fd), path)
	_, err = dir.Readdirnames(1)
	switch {
	case err == nil:
		err = errdefs.FailedPrecondition("the output directory %s is not empty", path)
	case errors.Is(err, io.EOF):
		_, err = dir.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// checkRunning returns FailedPrecondition unless a checkpoint of the container is possible in principle.
func (m *Manager) checkRunning(c lockedContainer) error {
	run := c.running.Load()
	if c.Phase() != state.ContainerRunning || run == nil || run.HasEnded() {
		return errdefs.FailedPrecondition("container %s does not run", c.ID)
	}
	if m.runtimeOf(c.container) != nil {
		return errdefs.FailedPrecondition(
			"container %s: the runtime of its handler is not berth's own, so it cannot be checkpointed", c.ID)
	}
	return nil
}
