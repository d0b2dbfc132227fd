package process

import (
	"context"
	"fmt"
	"os"
	"time"
)

// commandPatience bounds the wait for init's execve. OCI hooks of the kind startContainer run before it, and on a node that is
// overcommitted init gets no processor for seconds.
const commandPatience = 10 * time.Second

// awaitCommand waits until the container's init has executed the container's command. A launch is over a moment before: runc's
// init closes the exec FIFO, runs hooks, and then executes. A signal that comes in between hits a Go program, which as
// process 1 of a PID namespace exits with 2 (runc #5189, not mended in 1.5; containerd and CRI-O have it, too).
//
// Until then init executes the daemon's sealed copy of berth-shim, which is known by its device and inode: a name would be the
// container's to choose.
func (k Kit) awaitCommand(ctx context.Context, id string, run *Running) {
	ctx, cancel := context.WithTimeout(ctx, commandPatience)
	defer cancel()
	if k.LauncherFile == nil {
		return
	}
	exe, launcher := fmt.Sprintf("/proc/%d/exe", run.PID), k.LauncherFile()
	for !run.HasEnded() {
		if now, err := os.Stat(exe); err != nil || !os.SameFile(now, launcher) {
			return
		}
		if !k.Tasks.Sleep(ctx, time.Millisecond, "its command to be executed", "container "+id) {
			return
		}
	}
}
