package taskapi

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/failpoint"
)

func (c *command) create(ctx context.Context, id string) (err error) {
	spec, err := readJSON[specs.Spec](filepath.Join(c.bundle, "config.json"))
	if err != nil {
		return err
	}
	failpoint.Reach("task.make-root")
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	failpoint.Reach("task.root-made")
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, unlock())
		if errors.Is(err, errUnanswered) {
			err = errors.Join(err, c.endLost(ctx, id))
		}
	}()
	failpoint.Reach("task.make-directory")
	if err := os.Mkdir(c.taskDir(id), 0o700); err != nil {
		return err
	}
	failpoint.Reach("task.directory-made")
	t := taskRecord{Bundle: c.bundle}
	if spec.Annotations[typeAnnotation] == typeSandbox {
		return c.createSandbox(ctx, id, &spec, t)
	}
	return c.createContainer(ctx, id, &spec, t)
}

// createSandbox starts the shim. The sandbox's container has no streams.
func (c *command) createSandbox(ctx context.Context, id string, spec *specs.Spec, t taskRecord) (err error) {
	if err := c.saveTask(id, t); err != nil {
		return err
	}
	log, err := openShimLog(c.bundle)
	if err != nil {
		return err
	}
	defer log.explain(&err)
	shim, r, err := c.startShim(ctx, id, c.bundle, shimCgroup(spec.Linux.CgroupsPath, c.systemdCgroup))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	if err := c.createTask(ctx, shim, id, spec, t); err != nil {
		return err
	}
	return c.identify(ctx, shim, r)
}

// createContainer creates a task in the shim of its sandbox. If create fails, the launcher calls
// delete.
func (c *command) createContainer(ctx context.Context, id string, spec *specs.Spec, t taskRecord) (err error) {
	shim, r, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	if t.streams, err = makeStreams(c.taskDir(id), spec.Process.Terminal); err != nil {
		return err
	}
	release, err := t.hold()
	if err != nil {
		return err
	}
	defer release()
	var shared []string
	t.Mounts, shared = ownMounts(spec, c.bundle)
	if err := c.saveTask(id, t); err != nil {
		return err
	}
	if err := passMounts(r.PID, slices.Concat(t.Mounts, shared)); err != nil {
		return err
	}
	err = c.createTask(ctx, shim, id, spec, t)
	return errors.Join(err, unmountIn(r.PID, shared))
}

func (c *command) saveTask(id string, t taskRecord) error {
	return writeJSON(filepath.Join(c.taskDir(id), "task.json"), t)
}

func (c *command) readTask(id string) (taskRecord, error) {
	return readJSON[taskRecord](filepath.Join(c.taskDir(id), "task.json"))
}

func (c *command) createTask(ctx context.Context, shim *client, id string, spec *specs.Spec, t taskRecord) error {
	options, err := optionsFor(c.options, spec)
	if err != nil {
		return err
	}
	failpoint.Reach("task.create")
	pid, err := shim.create(ctx, &task.CreateTaskRequest{
		ID: id, Bundle: c.bundle, Options: options,
		Terminal: t.Terminal, Stdin: t.Stdin, Stdout: t.Stdout, Stderr: t.Stderr,
	})
	failpoint.Reach("task.created")
	if err == nil {
		t.Created = true
		err = c.saveTask(id, t)
	}
	if err != nil {
		return err
	}
	return os.WriteFile(c.pidFile, []byte(strconv.Itoa(pid)), 0o600)
}
