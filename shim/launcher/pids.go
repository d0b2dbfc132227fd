package launcher

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/exeseal"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/launcher/criu"
	"berth/shim/proto"
)

// lastPID is the kernel's last assigned process ID in the PID namespace of the process that opens
// it.
const lastPID = "/proc/sys/kernel/ns_last_pid"

// reservePIDs makes the kernel assign new process IDs above all saved ones. They are in the
// checkpoints of this container and of containers that will be restored later. Otherwise, in a
// shared PID namespace, this container could get IDs of the later containers, and CRIU could not
// restore them.
func (b *restoreBackend) reservePIDs() error {
	namespace := b.config.Namespaces.PathOf(configs.NEWPID)
	if namespace == "" {
		return nil // its own, or the host's
	}
	highest, err := highestPID(b.Restore.Images, b.Restore.Pending)
	if err != nil {
		return err
	}
	return enterAndReserve(namespace, highest)
}

// highestPID returns the highest process ID in the images of a container and of others that will be
// restored later. Images of other containers may be missing, because these were restored or removed
// meanwhile.
func highestPID(images string, pending []string) (int, error) {
	highest, err := criu.HighestPID(images)
	if err != nil {
		return 0, err
	}
	for _, other := range pending {
		n, err := criu.HighestPID(other)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
		highest = max(highest, n)
	}
	return highest, nil
}

// enterAndReserve runs RaiseLastPID in a PID namespace. The program is a sealed copy, because
// processes of the pod can see it and must not get access to the original.
func enterAndReserve(namespace string, pid int) error {
	program, err := exeseal.CloneSelfExe("")
	if err != nil {
		return fmt.Errorf("reserve process IDs: %w", err)
	}
	defer program.Close() // it was only executed
	cmd := exec.Command(fmt.Sprintf("/proc/self/fd/%d", program.Fd()), proto.RaiseLastPID, strconv.Itoa(pid))
	failpoint.Reach("launcher.reserve-pids")
	err = runInPIDNamespace(namespace, cmd)
	failpoint.Reach("launcher.pids-reserved")
	if err != nil {
		return fmt.Errorf("reserve process IDs in %s: %w", namespace, err)
	}
	return nil
}

// runInPIDNamespace runs a command in a PID namespace, given by its path. An error has the output.
func runInPIDNamespace(namespace string, cmd *exec.Cmd) error {
	ns, err := os.Open(namespace)
	if err != nil {
		return err
	}
	defer ns.Close() // Close of a namespace cannot fail
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends, because its children would be in the namespace
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWPID); err != nil {
			done <- os.NewSyscallError("setns", err)
			return
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
		}
		done <- err
	}()
	return <-done
}

// RaiseLastPID makes the kernel assign higher process IDs than pid in this process's PID namespace,
// unless it already does. It is the program of enterAndReserve.
func RaiseLastPID(args []string) error {
	if len(args) != 1 {
		return errors.New("one process ID is needed")
	}
	pid, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	data, err := os.ReadFile(lastPID)
	if err != nil {
		return err
	}
	if last, err := strconv.Atoi(strings.TrimSpace(string(data))); err != nil || last >= pid {
		return err
	}
	failpoint.Reach("launcher.raise-last-pid")
	err = os.WriteFile(lastPID, []byte(args[0]), 0)
	failpoint.Reach("launcher.last-pid-raised")
	if err != nil {
		return fmt.Errorf("raise the last process ID to %d: %w", pid, err)
	}
	return nil
}
