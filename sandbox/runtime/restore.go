package runtime

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/checkpoint/process"
	"berth/checkpoint/process/archive"
	"berth/image/unpack"
	"berth/internal/criu"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// Unpacker unpacks a tar into a directory, in a confined process. *process.Program implements it.
type Unpacker interface {
	Unpack(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error)
}

// Restores prepares what pods and containers get from a checkpoint. Names in a checkpoint never
// select a file outside berth's own directories, or an image to use.
type Restores struct {
	Dirs     state.Dirs
	Key      func() (*archive.Key, error) // of this node
	Unpacker Unpacker
}

// Import copies the checkpoint at path to the directory of the pod with that ID and checks it. The
// caller removes Dirs.Writable of the pod after an error. The original is not needed afterwards.
//
// Errors: InvalidArgument for a malformed checkpoint. FailedPrecondition for a checkpoint that is
// not signed with the node's key, or of another architecture.
func (k Restores) Import(ctx context.Context, path, podID string) (*archive.Archive, error) {
	key, err := k.Key()
	if err != nil {
		return nil, err
	}
	from, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, errdefs.InvalidArgument("open checkpoint: %w", err)
	}
	defer from.Close() // it was only read
	dir := k.Dirs.Checkpoint(podID)
	failpoint.Reach("restore.make-directory")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory for a checkpoint: %w", err)
	}
	failpoint.Reach("restore.directory-made")
	to, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open directory for a checkpoint: %w", err)
	}
	defer to.Close() // its files are synced or worthless
	failpoint.Reach("restore.import")
	a, err := archive.Import(ctx, from, to, key)
	if err != nil {
		return nil, fmt.Errorf("import checkpoint %s: %w", path, err)
	}
	failpoint.Reach("restore.imported")
	if arch := a.Manifest.Node.Architecture; arch != "" && arch != goruntime.GOARCH {
		return nil, errdefs.FailedPrecondition("checkpoint %s was made on %s, this node is %s", path, arch, goruntime.GOARCH)
	}
	return a, nil
}

// Compare returns FailedPrecondition with the difference if a checkpoint does not belong to a
// container with this image and spec.
func (k Restores) Compare(ctx context.Context, a *archive.Archive, c *state.Container, runtimeSpec *specs.Spec) error {
	return process.Compare(a, process.Request{
		Dir:     k.Dirs.CheckpointOf(c.PodID, c.Restore),
		Entry:   c.Restore.Name,
		Name:    c.Config.GetMetadata().GetName(),
		ImageID: c.Image.ID,
		Spec:    runtimeSpec,
	})
}

// restoreTimeout bounds the restore of a container. kubelet waits for two minutes.
const restoreTimeout = 110 * time.Second

// restoreSandbox returns the checkpoint that a pod's sandbox or the container in it continues, or
// nil.
func (k Launcher) restoreSandbox(pod *state.Pod, r *state.Restore) *proto.Restore {
	if r == nil {
		return nil
	}
	images := filepath.Join(k.Node.CheckpointOf(pod.ID, r), archive.ImagesDir)
	return &proto.Restore{Images: images, Timeout: restoreTimeout}
}

// checkRestored returns FailedPrecondition if a pod's sandbox waits for the restore of a container.
// It would treat the next container as that container.
func checkRestored(ctx context.Context, pod *state.Pod) error {
	if pod.Restore == nil {
		return nil
	}
	runs, err := pod.Runtime.Program().HasProcesses(ctx, pod.ID)
	if err == nil && !runs {
		err = errdefs.FailedPrecondition(
			"the restored container of pod sandbox %s must start first; if it has failed, remove the pod", pod.ID)
	}
	return err
}

// restore returns the checkpoint that a container continues, or nil.
func (k Launcher) restore(ctx context.Context, pod *state.Pod, c *state.Container) (*proto.Restore, error) {
	if c.Restore == nil {
		return nil, checkRestored(ctx, pod)
	}
	if pod.Sandboxed() {
		return k.restoreSandbox(pod, c.Restore), nil
	}
	program, err := criu.Locate(k.Node.CRIU)
	if err != nil {
		return nil, errdefs.FailedPrecondition("restore: %w", err)
	}
	images := filepath.Join(k.Node.CheckpointOf(c.PodID, c.Restore), archive.ImagesDir)
	// The checkpoints of containers that have started are removed.
	pending, err := filepath.Glob(filepath.Join(k.Node.Checkpoint(c.PodID), "*", archive.ImagesDir))
	if err != nil {
		return nil, fmt.Errorf("restore: %w", err)
	}
	return &proto.Restore{CRIU: program, Images: images, Timeout: restoreTimeout, Pending: pending}, nil
}
