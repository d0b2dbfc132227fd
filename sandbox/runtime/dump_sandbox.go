package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"berth/checkpoint/process/archive"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/task"
	"berth/sandbox/state"
	"berth/shim/ociruntime"
)

// SaveSandbox saves a pod's sandbox into archive.ImagesDir below dir. The sandbox must have no
// other container than c. The container's changed files are in the images, because the sandbox
// keeps them in its own overlay. No container may start in the sandbox meanwhile.
//
// The sandbox stops and continues by itself. An end of ctx does not cancel a save that has begun.
// Errors: FailedPrecondition if the sandbox cannot be saved. ResourceExhausted if a filesystem is
// full.
func (k Dumper) SaveSandbox(ctx context.Context, pod *state.PodSpec, c *state.ContainerSpec, dir *os.File) error {
	program := pod.Runtime.Program()
	if err := k.checkSandbox(pod, program, c.ID); err != nil {
		return err
	}
	if err := k.checkOverlay(pod.ID, c); err != nil {
		return err
	}
	if err := k.checkShm(pod.ID); err != nil {
		return err
	}
	saving, cancel := context.WithTimeout(context.WithoutCancel(ctx), task.Timeout)
	defer cancel()
	failpoint.Reach("checkpoint.save-sandbox")
	err := program.Checkpoint(saving, pod.ID, dir, archive.ImagesDir)
	failpoint.Reach("checkpoint.sandbox-saved")
	if err != nil {
		return sandboxFailed(err, pod.ID)
	}
	return k.checkShm(pod.ID)
}

// sandboxFailed adds a gRPC code to an error that a runtime has reported about a sandbox. It also
// shortens the error.
func sandboxFailed(err error, id string) error {
	var said *ociruntime.Error
	if !errors.As(err, &said) {
		return err
	}
	for _, full := range []unix.Errno{unix.ENOSPC, unix.EDQUOT} {
		if strings.Contains(said.Message, full.Error()) { // in the middle of gVisor's message
			return fmt.Errorf("%s: write the images: %w", said.Command, full)
		}
	}
	_, cause, found := strings.Cut(said.Message, fmt.Sprintf("%q: ", id))
	if !found {
		cause = said.Message
	}
	return errdefs.FailedPrecondition("%s: %s", said.Command, errdefs.Clip(cause))
}

// checkSandbox returns FailedPrecondition unless a restore could recreate the pod's sandbox with
// this container only.
func (k Dumper) checkSandbox(pod *state.PodSpec, program *ociruntime.Runtime, id string) error {
	if program.Version == "" {
		return errdefs.FailedPrecondition("its pod was started by an older berth; restart it")
	}
	want := []string{id, pod.ID}
	slices.Sort(want)
	have, err := program.Containers()
	if err != nil {
		return err
	}
	if !slices.Equal(have, want) {
		return errdefs.FailedPrecondition(
			"its sandbox has %d containers besides the pause; pods with one container can be checkpointed", len(have)-1)
	}
	return nil
}

// checkOverlay returns FailedPrecondition unless the sandbox keeps the container's changed files. A
// read-only root filesystem has no writable layer.
func (k Dumper) checkOverlay(podID string, c *state.ContainerSpec) error {
	if c.Config.GetLinux().GetSecurityContext().GetReadonlyRootfs() {
		return nil
	}
	// runsc's file with the changes of a root filesystem (option overlay2, medium self).
	overlay := filepath.Join(k.Node.Writable(c.ID), "upper", ".gvisor.filestore."+podID)
	_, err := os.Lstat(overlay)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.FailedPrecondition(
			"its changed files are not in the sandbox; the option overlay2 of runsc must be root:self, its default")
	}
	if err != nil {
		return fmt.Errorf("look for the sandbox's overlay: %w", err)
	}
	return nil
}

// checkShm returns FailedPrecondition if the pod's /dev/shm has files. They are on the node, and
// nothing keeps them unchanged while the sandbox is saved.
func (k Dumper) checkShm(podID string) error {
	dir, err := os.Open(k.Node.Shm(podID))
	if errors.Is(err, fs.ErrNotExist) { // the pod uses the node's
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for files in /dev/shm: %w", err)
	}
	defer dir.Close() // it was only read
	switch _, err := dir.Readdirnames(1); {
	case err == nil:
		return errdefs.FailedPrecondition("its pod has files in /dev/shm, which are not saved with a sandbox")
	case errors.Is(err, io.EOF):
		return nil
	default:
		return fmt.Errorf("look for files in /dev/shm: %w", err)
	}
}
