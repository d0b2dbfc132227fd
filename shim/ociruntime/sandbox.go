package ociruntime

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Checkpoint saves the sandbox of a Sandboxed runtime, with all of its containers, into the new
// directory images below dir. id is the sandbox's. The containers go on when Checkpoint returns,
// also after an error. The sandbox stops and continues by itself, so nothing stays frozen if the
// command or its caller is killed. An end of ctx does not end a save that has begun.
func (r *Runtime) Checkpoint(ctx context.Context, id string, dir *os.File, images string) error {
	const firstExtra = 3
	cmd := r.command(ctx, "", "checkpoint", "--leave-running", "--compression", "none",
		"--image-path", fmt.Sprintf("/proc/self/fd/%d/%s", firstExtra, images), id)
	cmd.ExtraFiles = []*os.File{dir}
	err := r.call(cmd, "checkpoint")
	if err == nil {
		return nil
	}
	// If the command was killed, the sandbox still saves. The sandbox accepts a signal only after
	// the save. The pause ignores this signal. A sandbox that has ended accepts no signal, and is
	// not frozen either.
	_ = r.run(ctx, "kill", id, fmt.Sprint(int(unix.SIGWINCH)))
	return err
}

// Restore restores a created container of a Sandboxed runtime from the images that Checkpoint has
// written. The restore of the sandbox comes first. The processes run when all containers of the
// checkpoint are restored. Only a container in a sandbox gets its streams here.
func (r *Runtime) Restore(ctx context.Context, id, bundle, images string, streams IO) error {
	return r.begin(ctx, bundle, streams, "restore", "--detach", "--image-path", images, id)
}

// AwaitRestored waits until the processes of a restored sandbox run. id is one of its containers.
func (r *Runtime) AwaitRestored(ctx context.Context, id, bundle string) (err error) {
	defer r.cleanBundle(bundle, &err)
	cmd := r.command(ctx, "", "wait", "--restore", id)
	if err := useBundle(cmd, bundle); err != nil {
		return err
	}
	return r.finish(cmd, "wait")
}

// HasProcesses returns whether a container of a Sandboxed runtime has processes. A sandbox that
// waits for the restore of its containers has no processes.
func (r *Runtime) HasProcesses(ctx context.Context, id string) (bool, error) {
	document, err := r.output(ctx, "ps", "--format", "json", id)
	if err != nil {
		return false, err
	}
	var pids []int
	if err := json.Unmarshal(document, &pids); err != nil {
		return false, fmt.Errorf("processes of %s: %q: %w", id, firstLine(document), err)
	}
	return len(pids) > 0, nil
}

// sandboxMark is between the IDs of a container and of its sandbox in the names of runsc's files.
const sandboxMark = "_sandbox:"

// Containers returns the IDs of the containers of a Sandboxed runtime that are not deleted, sorted.
// The ID of the sandbox is included.
func (r *Runtime) Containers() ([]string, error) {
	found, err := filepath.Glob(filepath.Join(r.Root, "*"+sandboxMark+"*.state"))
	if err != nil {
		return nil, fmt.Errorf("list containers in %s: %w", r.Root, err)
	}
	var ids []string
	for _, path := range found {
		id, _, _ := strings.Cut(filepath.Base(path), sandboxMark)
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids, nil
}
