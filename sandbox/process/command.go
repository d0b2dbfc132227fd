package process

import (
	"context"
	"fmt"
	"os"
	"time"
)

const (
	// launcherExe is what the container's init executes until it executes the container's command: the sealed
	// copy of berth-shim.
	launcherExe = "/memfd:berth-shim (deleted)"
	// commandPatience bounds the wait for that. OCI hooks of the kind startContainer run before it, and on a node that is
	// overcommitted init gets no processor for seconds.
	commandPatience = 10 * time.Second
)

// awaitCommand waits until the container's init has executed the container's command. A launch is over a moment before: runc's
// init closes the exec FIFO, runs hooks, and then executes. A signal that comes in between hits a Go program, which as
// process 1 of a PID namespace exits with 2 (runc #5189, not mended in 1.5; containerd and CRI-O have it, too).
func (k Kit) awaitCommand(ctx context.Context, id string, run *Running) {
	ctx, cancel := context.WithTimeout(ctx, commandPatience)
	defer cancel()
	exe := fmt.Sprintf("/proc/%d/exe", run.PID)
	for !run.HasEnded() {
		if now, err := os.Readlink(exe); err != nil || now != launcherExe {
			return
		}
		if !k.Tasks.Sleep(ctx, time.Millisecond, "its command to be executed", "container "+id) {
			return
		}
	}
}
