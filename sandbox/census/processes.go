package census

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
)

// Processes is what a container's processes have open, of maxFiles files at most.
type Processes struct {
	Files, Sockets uint64
	MaxFiles       uint64 // soft limit of the init; math.MaxUint64: none
}

// countProcesses counts what the processes in a cgroup have open. Those that end
// meanwhile count as far as they were seen.
func countProcesses(ctx context.Context, cgroupsPath string, systemd bool, init int) (*Processes, error) {
	group, err := cgroup.Open(cgroupsPath, systemd)
	if err != nil {
		return nil, err
	}
	pids, err := group.Members()
	if err != nil {
		return nil, err
	}
	var limit unix.Rlimit
	err = unix.Prlimit(init, unix.RLIMIT_NOFILE, nil, &limit)
	if err != nil && err != unix.ESRCH {
		return nil, fmt.Errorf("limits of process %d: %w", init, err)
	}
	counted := &Processes{MaxFiles: limit.Cur}
	for _, pid := range pids {
		if err := counted.addFiles(ctx, fmt.Sprintf("/proc/%d/fd/", pid)); err != nil {
			return nil, fmt.Errorf("count open files: %w", err)
		}
	}
	return counted, nil
}

// addFiles counts the descriptors in a folder /proc/PID/fd. A process that has ended has none.
func (p *Processes) addFiles(ctx context.Context, dir string) error {
	f, err := os.Open(dir)
	if ended(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for p.Files < maxFiles {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := f.Readdirnames(256)
		for _, name := range names {
			target, err := os.Readlink(dir + name)
			if err != nil && !ended(err) {
				return err
			}
			p.Files++
			if strings.HasPrefix(target, "socket:") {
				p.Sockets++
			}
		}
		if err == io.EOF || ended(err) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func ended(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }
