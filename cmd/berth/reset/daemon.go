package reset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/cmd/config"
	"berth/internal/pidfd"
)

// daemonOf returns the process ID of the daemon that uses the directories of cfg, 0 for none. It
// creates nothing.
func daemonOf(cfg *config.Config) (int, error) {
	for _, dir := range []string{cfg.Root, cfg.State} {
		pid, err := holderOf(filepath.Join(dir, "lock"))
		if pid != 0 || err != nil {
			return pid, err
		}
	}
	return 0, nil
}

// lockTimeout is how long a lock may stay taken after its daemon was killed. A child of the daemon
// keeps the lock between fork and exec.
const lockTimeout = 500 * time.Millisecond

// tryLock takes a shared lock on file. It repeats the attempt for lockTimeout.
func tryLock(file *os.File) error {
	for deadline := time.Now().Add(lockTimeout); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			return err
		}
	}
}

// holderOf returns the process that holds the lock at path, 0 for none.
func holderOf(path string) (int, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open the daemon's lock: %w", err)
	}
	defer file.Close()
	err = tryLock(file)
	if err == nil {
		return 0, nil
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return 0, fmt.Errorf("try the daemon's lock %s: %w", path, err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read the daemon's lock: %w", err)
	}
	pid, err := strconv.Atoi(string(bytes.TrimSpace(text)))
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%s is locked by a daemon, but does not contain its process ID", path)
	}
	return pid, nil
}

// stopTimeout bounds the daemon's shutdown, which takes up to 35 seconds.
const stopTimeout = 45 * time.Second

// stopDaemon stops the daemon, if there is one, and waits for its end. systemd would restart the
// process of a unit, so systemctl stops the unit and its sockets. It also stops the sockets if no
// daemon runs.
func stopDaemon(ctx context.Context, pid int, listen string) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if err := stopSockets(ctx, listen); err != nil {
		return err
	}
	if pid == 0 {
		return nil
	}
	if unit := unitOf(pid); unit != "" {
		return stopUnit(ctx, unit)
	}
	process, err := pidfd.Open(pid)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stop the daemon, process %d: %w", pid, err)
	}
	defer process.Close()
	if err := pidfd.Signal(process, unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the daemon, process %d: %w", pid, err)
	}
	if err := pidfd.Wait(ctx, process); err != nil {
		return fmt.Errorf("wait for the end of the daemon, process %d: %w", pid, err)
	}
	return nil
}

// systemdMarker exists if systemd is PID 1, see sd_booted(3).
const systemdMarker = "/run/systemd/system"

// unitOf returns the systemd service of a process, or "".
func unitOf(pid int) string {
	if _, err := os.Stat(systemdMarker); err != nil {
		return ""
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	return serviceIn(string(groups))
}

// serviceIn returns the service in the content of /proc/PID/cgroup. On cgroup v1 it is in the
// hierarchy of systemd.
func serviceIn(groups string) string {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || parts[1] != "" && parts[1] != "name=systemd" {
			continue
		}
		for part := range strings.SplitSeq(parts[2], "/") {
			// Processes of a user's manager or session are not the unit's main processes.
			if strings.HasSuffix(part, ".service") && !strings.HasPrefix(part, "user@") {
				return part
			}
		}
	}
	return ""
}

// stopUnit stops a unit of systemd and the sockets that would start it again.
func stopUnit(ctx context.Context, unit string) error {
	out, err := systemctl(ctx, "show", "--property", "TriggeredBy", "--value", unit)
	if err != nil {
		return err
	}
	_, err = systemctl(ctx, append(append([]string{"stop"}, strings.Fields(out)...), unit)...)
	return err
}

// stopSockets stops the sockets of systemd at the daemon's path. A client that connects would start
// a daemon.
func stopSockets(ctx context.Context, listen string) error {
	if _, err := os.Stat(systemdMarker); err != nil {
		return nil
	}
	out, err := systemctl(ctx, "list-sockets", "--full", "--plain", "--no-legend")
	if err != nil {
		return err
	}
	units := socketsAt(out, listen)
	if len(units) == 0 {
		return nil
	}
	_, err = systemctl(ctx, append([]string{"stop"}, units...)...)
	return err
}

// socketsAt returns the units that listen at a path, in a list of systemctl list-sockets.
func socketsAt(list, path string) (units []string) {
	for line := range strings.Lines(list) {
		if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == path {
			units = append(units, fields[1])
		}
	}
	return units
}

// systemctl runs systemctl and returns its output.
func systemctl(ctx context.Context, args ...string) (string, error) {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "systemctl", args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return string(out), nil
}
