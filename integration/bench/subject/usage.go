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

// usageFile returns the file with the CPU time of a cgroup, given as a path in its hierarchy.
func usageFile(cgroup string) string {
	if Cgroup2() {
		return filepath.Join("/sys/fs/cgroup", cgroup, "cpu.stat")
	}
	return filepath.Join(accounting, cgroup, "cpuacct.usage")
}

// accounting is the cgroup v1 hierarchy that counts CPU time.
const accounting = "/sys/fs/cgroup/cpuacct"

// Cgroup2 reports whether this machine uses only cgroup v2.
func Cgroup2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// Controllers returns the controllers of cgroup v2. ok is false if this machine uses v1, too.
func Controllers() (list []string, ok bool) {
	content, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	return strings.Fields(string(content)), err == nil
}

// makeCgroup makes a cgroup that counts CPU time, and returns its file of processes.
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

// CPU returns the CPU time of the runtime and its pods since its start.
func (s *Subject) CPU() (time.Duration, error) {
	var sum time.Duration
	for _, cgroup := range s.cgroups {
		path := usageFile(cgroup)
		content, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the runtime creates the pods' parent with the first pod
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

// AccountsCPU reports whether CPU is available for this runtime.
func (s *Subject) AccountsCPU() bool { return len(s.cgroups) > 0 }

// A runtime rests if it used at most restUsage of CPU time for restWindow. restUsage is not zero,
// because idle daemons wake up now and then.
const (
	restWindow = 25 * time.Millisecond
	restUsage  = 300 * time.Microsecond
	restLimit  = 3 * time.Second
)

// Rest waits until the runtime has finished its background work, so that each sample measures only
// its own cost. It gives up after 3 seconds, because a runtime that polls never rests.
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

// Memory is the PSS in bytes of the daemon, of its processes that belong to no pod, and of all
// other processes on this machine except containers and the benchmark.
type Memory struct{ Daemon, Kept, Others float64 }

func (m Memory) sum() float64 { return m.Daemon + m.Kept + m.Others }

// Memory measures the memory now. Others includes all runtimes, so it is useful only as a
// difference of two measurements between which no other runtime changed.
func (s *Subject) Memory() (Memory, error) {
	all, err := processes()
	if err != nil {
		return Memory{}, err
	}
	if _, ok := all[s.Pid]; !ok {
		return Memory{}, fmt.Errorf("the daemon (process %d) has exited", s.Pid)
	}
	return sumMemory(all, s.Pid), nil
}

// sumMemory assigns processes to the daemon, to the processes that it keeps for later containers,
// or to others. A shim or monitor belongs to its pod.
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

// descends reports whether a process is ancestor or one of its descendants.
func descends(all map[int]process, pid, ancestor int) bool {
	for range all { // bounded, because a list that is not atomic may contain a cycle
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

// process holds the properties of a process that sumMemory needs.
type process struct {
	parent    int
	pss       float64
	container bool // the workload itself
	ofPod     bool
}

// podID matches the IDs of pods and containers in containerd, CRI-O and berth. They are in the
// command lines of shims and monitors, and in the names of cgroups.
var podID = regexp.MustCompile(`[0-9a-f]{64}`)

// processes returns all processes except kernel threads and the benchmark.
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

// readProcess reads a process. It returns false for kernel threads and exited processes.
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

// parentIn parses the parent's ID in /proc/PID/status.
func parentIn(status string) (int, error) {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, "PPid:"); ok {
			return strconv.Atoi(strings.TrimSpace(value))
		}
	}
	return 0, errors.New("no parent in it")
}

// settleTime is the idle time before a memory measurement. berth returns memory to the kernel 3 s
// after the last change. A short peak does not matter for a node that runs for hours.
const settleTime = 5 * time.Second

// SettledMemory returns a measurement once two in a row are nearly equal, or after a limit. Before
// each one the daemon answers the requests that kubelet makes every second, so that their memory
// counts.
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

// Disk returns how many bytes of content the runtime's root directory holds. A file with several
// names counts once, and holes do not count.
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
