package stats

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"berth/sandbox/state"
)

// Processes counts the open files of a container's processes, up to maxFiles.
type Processes struct {
	Files, Sockets uint64
	MaxFiles       uint64 // soft limit of the init process; math.MaxUint64: unlimited
}

// countProcesses counts the open files of all processes in a cgroup. If a process exits during the
// count, the files seen so far count.
func countProcesses(ctx context.Context, node state.Node, cgroupsPath string, init int) (*Processes, error) {
	group, err := node.Cgroup(cgroupsPath)
	if err != nil {
		return nil, err
	}
	pids, err := group.Members()
	if err != nil {
		return nil, err
	}
	limit, err := openFilesLimit(fmt.Sprintf("/proc/%d/limits", init))
	if err != nil && !ended(err) {
		return nil, fmt.Errorf("read limits of process %d: %w", init, err)
	}
	counted := &Processes{MaxFiles: limit}
	for _, pid := range pids {
		if err := counted.addFiles(ctx, fmt.Sprintf("/proc/%d/fd/", pid)); err != nil {
			return nil, fmt.Errorf("count open files: %w", err)
		}
	}
	return counted, nil
}

// maxLimits exceeds the size of /proc/PID/limits: 17 lines of 81 bytes.
const maxLimits = 8 << 10

// openFilesLimit reads the soft limit of open files from a /proc/PID/limits. Any user may read that
// file, while prlimit(2) of another user's process needs CAP_SYS_RESOURCE.
func openFilesLimit(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxLimits))
	if err != nil {
		return 0, err
	}
	return parseOpenFiles(string(content))
}

// parseOpenFiles returns the soft limit of open files.
func parseOpenFiles(limits string) (uint64, error) {
	for line := range strings.Lines(limits) {
		values, found := strings.CutPrefix(line, "Max open files ")
		if !found {
			continue
		}
		fields := strings.Fields(values) // soft limit, hard limit, unit
		if len(fields) < 2 {
			break
		}
		if fields[0] == "unlimited" {
			return math.MaxUint64, nil
		}
		return strconv.ParseUint(fields[0], 10, 64)
	}
	return 0, errors.New("no line \"Max open files\"")
}

// addFiles counts the descriptors in a /proc/PID/fd directory. An exited process counts as zero.
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
