package harness

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"berth/integration/machine"
)

// idleSockets is the number of sockets of a process of sessions that has no session: of the daemon,
// its connection, and of the clients.
const idleSockets = 3

// EndSessions ends the daemon's processes of sessions as soon as their sessions have ended. They
// would end ten seconds later. It ends no process with a session, so that the leak check finds it.
func (d *Daemon) EndSessions(t *testing.T) {
	t.Helper()
	for _, pid := range d.SessionProcesses() {
		err := WaitFor(func() error {
			if sockets := socketsOf(pid); len(sockets) > idleSockets {
				return fmt.Errorf("%d sockets", len(sockets))
			}
			return nil
		})
		if err != nil {
			t.Logf("the process of sessions %d is not ended: %v", pid, err)
			continue
		}
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
		EventuallyTrue(t, "the process of sessions has ended", func() bool { return !machine.Alive(pid) })
	}
}

// SessionProcesses returns the processes whose sockets are in the daemon's state directory.
func (d *Daemon) SessionProcesses() []int {
	return slices.DeleteFunc(machine.ProcessesOf("berth-stream"), func(pid int) bool {
		held := socketsOf(pid)
		for _, line := range machine.ReadLines(fmt.Sprintf("/proc/%d/net/unix", pid)) {
			fields := strings.Fields(line) // the inode is the seventh, and the path follows if there is one
			if len(fields) < 8 || !slices.Contains(held, "socket:["+fields[6]+"]") {
				continue
			}
			if fileExists(filepath.Join(d.State, "sessions", filepath.Base(fields[7]))) {
				return false
			}
		}
		return true
	})
}

// socketsOf returns the sockets of a process.
func socketsOf(pid int) (sockets []string) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	for _, fd := range machine.ReadDir(dir) {
		if target, err := os.Readlink(filepath.Join(dir, fd)); err == nil && strings.HasPrefix(target, "socket:") {
			sockets = append(sockets, target)
		}
	}
	return sockets
}
