package subject

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// usageFile returns the file that holds what a cgroup (a path from the root of its hierarchy) has used of the CPU.
func usageFile(cgroup string) string {
	if Cgroup2() {
		return filepath.Join("/sys/fs/cgroup", cgroup, "cpu.stat")
	}
	return filepath.Join(accounting, cgroup, "cpuacct.usage")
}

// accounting is cgroup v1's hierarchy of CPU time.
const accounting = "/sys/fs/cgroup/cpuacct"

// Cgroup2 tells whether this machine has the unified hierarchy alone.
func Cgroup2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// makeCgroup makes a cgroup where CPU time is accounted, and returns its file of processes.
func makeCgroup(cgroup string) (string, error) {
	dir := filepath.Dir(usageFile(cgroup))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return filepath.Join(dir, "cgroup.procs"), nil
}

// parseUsage reads cgroup v1's nanoseconds, or the usage_usec of cgroup v2's cpu.stat.
func parseUsage(content string) (time.Duration, error) {
	if ns, err := strconv.ParseInt(strings.TrimSpace(content), 10, 64); err == nil {
		return time.Duration(ns), nil
	}
	for line := range strings.Lines(content) {
		if value, ok := strings.CutPrefix(line, "usage_usec "); ok {
			us, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			return time.Duration(us) * time.Microsecond, err
		}
	}
	return 0, errors.New("no CPU time in it")
}

// CPU returns what the runtime and its pods have used of the CPU since it was started.
func (s *Subject) CPU() (time.Duration, error) {
	var sum time.Duration
	for _, cgroup := range s.cgroups {
		path := usageFile(cgroup)
		content, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the pods' parent: the first pod makes it
		}
		if err != nil {
			return 0, err
		}
		used, err := parseUsage(string(content))
		if err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		sum += used
	}
	return sum, nil
}

// AccountsCPU tells whether CPU knows anything.
func (s *Subject) AccountsCPU() bool { return len(s.cgroups) > 0 }

// When a runtime counts as at rest: it has used next to nothing for a while. Daemons wake up now and then for nothing.
const (
	restWindow = 25 * time.Millisecond
	restUsage  = 300 * time.Microsecond
	restLimit  = 3 * time.Second
)

// Rest waits until the runtime has finished what it does behind its answers, so that a sample has all of its own cost
// and none of the one before. It gives up after 3 seconds: a runtime that polls is never at rest.
func (s *Subject) Rest(ctx context.Context) error {
	if !s.AccountsCPU() {
		return wait(ctx, 2*restWindow)
	}
	last, err := s.CPU()
	for begin := time.Now(); err == nil && time.Since(begin) < restLimit; {
		if err := wait(ctx, restWindow); err != nil {
			return err
		}
		var now time.Duration
		if now, err = s.CPU(); now-last < restUsage {
			return err
		}
		last = now
	}
	return err
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// PSS returns the proportional set size of a process in bytes.
func PSS(pid int) (float64, error) {
	path := fmt.Sprintf("/proc/%d/smaps_rollup", pid)
	rollup, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(rollup)) {
		if value, ok := strings.CutPrefix(line, "Pss:"); ok {
			kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
			return kib * 1024, err
		}
	}
	return 0, fmt.Errorf("%s has no Pss", path)
}

// Memory is the PSS in bytes of a daemon, of the processes that it keeps and that belong to no pod, and of all others on this machine but for
// containers and ourselves.
type Memory struct{ Daemon, Kept, Others float64 }

func (m Memory) sum() float64 { return m.Daemon + m.Kept + m.Others }

// Memory takes stock. The others' processes belong to all runtimes: compare two Memories of a machine on which
// only this one has changed.
func (s *Subject) Memory() (Memory, error) {
	all, err := processes()
	if err != nil {
		return Memory{}, err
	}
	if _, ok := all[s.Pid]; !ok {
		return Memory{}, fmt.Errorf("the daemon, process %d, is gone", s.Pid)
	}
	return sumMemory(all, s.Pid), nil
}

// sumMemory tells the processes of a daemon from all others: itself, and what it has started and keeps, such as processes that wait
// to launch the next container, but for what belongs to a pod. A shim or monitor is the pod's, whoever started it.
func sumMemory(all map[int]process, daemon int) (m Memory) {
	for pid, p := range all {
		switch {
		case p.container:
		case pid == daemon:
			m.Daemon = p.pss
		case descends(all, pid, daemon) && !p.ofPod:
			m.Kept += p.pss
		default:
			m.Others += p.pss
		}
	}
	return m
}

// descends tells whether a process is another one or has been started by it, directly or not.
func descends(all map[int]process, pid, ancestor int) bool {
	for range all { // in a list taken while processes end and begin there might be a circle
		if pid == ancestor {
			return true
		}
		p, ok := all[pid]
		if !ok {
			return false
		}
		pid = p.parent
	}
	return false
}

// process is what counts of one.
type process struct {
	parent    int
	pss       float64
	container bool // the workload itself
	ofPod     bool
}

// podID is how containerd, CRI-O and berth call pods and containers. Their shims and monitors have it on their command lines, and all that is in
// a pod has it in the name of its cgroup.
var podID = regexp.MustCompile(`[0-9a-f]{64}`)

// processes returns all but kernel threads and ourselves.
func processes() (map[int]process, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	all := map[int]process{}
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if p, ok := readProcess(pid); ok {
			all[pid] = p
		}
	}
	return all, nil
}

// readProcess returns false for a kernel thread, and for what has ended meanwhile.
func readProcess(pid int) (p process, ok bool) {
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || len(cmdline) == 0 {
		return p, false
	}
	cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return p, false
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return p, false
	}
	if p.parent, err = parentIn(string(status)); err != nil {
		return p, false
	}
	if p.pss, err = PSS(pid); err != nil {
		return p, false
	}
	p.container = strings.Contains(string(cmdline), workMark)
	p.ofPod = podID.Match(cmdline) || podID.Match(cgroup)
	return p, true
}

// parentIn reads /proc/PID/status.
func parentIn(status string) (int, error) {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, "PPid:"); ok {
			return strconv.Atoi(strings.TrimSpace(value))
		}
	}
	return 0, errors.New("no parent in it")
}

// settleTime is how long all runtimes are left alone before their memory counts: what matters of it is what it is for hours, and
// berth gives back what changes needed 3 s after the last one.
const settleTime = 5 * time.Second

// SettledMemory takes stock when two in a row are nearly the same, or after a while: some daemons never rest. Before each look the
// daemon answers what a kubelet asks every second, so that what it needs for that counts.
func (s *Subject) SettledMemory(ctx context.Context) (Memory, error) {
	const tolerance, tries = 64 << 10, 8
	if err := wait(ctx, settleTime); err != nil {
		return Memory{}, err
	}
	last, err := s.polledMemory(ctx)
	for n := 0; n < tries && err == nil; n++ {
		if err := wait(ctx, time.Second); err != nil {
			return last, err
		}
		var now Memory
		if now, err = s.polledMemory(ctx); err == nil {
			if diff := now.sum() - last.sum(); -tolerance < diff && diff < tolerance {
				return now, nil
			}
		}
		last = now
	}
	return last, err
}

func (s *Subject) polledMemory(ctx context.Context) (Memory, error) {
	if _, err := s.CountAllPods(ctx); err != nil {
		return Memory{}, err
	}
	if _, _, err := s.ListContainers(ctx); err != nil {
		return Memory{}, err
	}
	return s.Memory()
}

// Disk returns how many bytes of content the runtime's root directory holds: a file with several names counts once,
// a hole not at all.
func (s *Subject) Disk() (int64, error) {
	type inode struct{ dev, ino uint64 }
	seen := map[inode]bool{}
	var sum int64
	err := filepath.WalkDir(s.Root, func(_ string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		stat := info.Sys().(*syscall.Stat_t)
		id := inode{uint64(stat.Dev), stat.Ino}
		if !seen[id] {
			seen[id] = true
			sum += min(stat.Size, stat.Blocks*512)
		}
		return nil
	})
	return sum, err
}
