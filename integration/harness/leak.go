package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"berth/integration/machine"
)

// snapshot is what exists, by kind: for each kind a set of names with how often
// each occurs.
type snapshot map[string]map[string]int

func (s snapshot) add(kind, name string) {
	if s[kind] == nil {
		s[kind] = make(map[string]int)
	}
	s[kind][name]++
}

// madeOnce are the things that the first pod or image makes and that stay for good.
var madeOnce = map[string]bool{
	"fd of the daemon: /sys/fs/cgroup":         true, // opencontainers/cgroups opens files below it by openat2
	"file below root: /cni":                    true, // libcni's cache of results
	"file below root: /cni/results":            true,
	"file below root: /runtime/runtime.record": true, // what UpdateRuntimeConfig said
}

// Grown names everything there is more of in s than in before.
func (s snapshot) Grown(before snapshot) []string {
	var out []string
	for _, kind := range slices.Sorted(maps.Keys(s)) {
		for _, name := range slices.Sorted(maps.Keys(s[kind])) {
			n, was := s[kind][name], before[kind][name]
			if n > was && !(n == 1 && madeOnce[kind+": "+name]) {
				out = append(out, fmt.Sprintf("%s: %s (%d, before %d)", kind, name, n, was))
			}
		}
	}
	return out
}

// Summary shortens a list that is too long to be read: a layer that was not deleted
// has hundreds of files.
func Summary(diff []string) []string {
	const limit = 40
	if len(diff) > limit {
		diff = append(diff[:limit:limit], fmt.Sprintf("… and %d more", len(diff)-limit))
	}
	return diff
}

// NoLeaks fails the test if the daemon, with its pods and images removed, holds
// more than it did when it was new. Some things end a moment after the call that
// asks for it (processes are reaped, connections close), so the check is repeated.
func (d *Daemon) NoLeaks(t *testing.T) {
	t.Helper()
	d.leaks(t, d.Empty, func() snapshot { return d.Snapshot(t) })
}

// NoMachineLeaks fails the test if the machine holds more than before the daemon.
func NoMachineLeaks(t *testing.T, before snapshot, d *Daemon) {
	t.Helper()
	d.leaks(t, before, func() snapshot { return MachineSnapshot(d) })
}

// leakPatience is how long things may take to go away after the last call.
const leakPatience = 15 * time.Second

func (d *Daemon) leaks(t *testing.T, before snapshot, now func() snapshot) {
	t.Helper()
	Registry.DropIdle()
	err := WaitUpTo(leakPatience, func() error {
		if diff := now().Grown(before); len(diff) > 0 {
			return fmt.Errorf("%s", strings.Join(Summary(diff), "\n  "))
		}
		return nil
	})
	if err != nil {
		t.Errorf("left behind:\n  %v", err)
	}
}

// Snapshot takes everything the machine and the daemon hold.
func (d *Daemon) Snapshot(t *testing.T) snapshot {
	t.Helper()
	s := MachineSnapshot(d)
	pid := d.Cmd.Process.Pid
	for _, m := range machine.Mountpoints(t, pid) {
		s.add("mount of the daemon", m)
	}
	for _, fd := range OpenFiles(pid) {
		s.add("fd of the daemon", fd)
	}
	for range d.Goroutines(t) {
		s.add("goroutine of the daemon", "any")
	}
	addTree(s, "file below root", d.Root)
	addTree(s, "file below state", d.State)
	return s
}

// MachineSnapshot takes what exists outside of any daemon. d may be nil; it tells
// the addresses' directory and the objects whose cgroups may be anywhere.
func MachineSnapshot(d *Daemon) snapshot {
	s := snapshot{}
	addProcesses(s)
	for _, m := range machine.ReadLines("/proc/1/mountinfo") {
		s.add("mount", strings.Fields(m)[4])
	}
	for _, name := range machine.ReadDir("/run/netns") {
		s.add("network namespace", name)
	}
	for _, pin := range machine.NamespacePins("user:") {
		s.add("pinned user namespace", pin)
	}
	for _, pid := range machine.Processes() {
		if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", pid)); err == nil {
			s.add("user namespace of processes", link)
			s["user namespace of processes"][link] = 1
		}
	}
	addLinks(s)
	addRules(s, "iptables-save")
	addRules(s, "ip6tables-save")
	addCgroups(s, d)
	if d != nil {
		addAddresses(s, d.DataDir)
	}
	return s
}

// idPattern is what differs between two processes of the same kind.
var idPattern = regexp.MustCompile(`[0-9a-f]{12,}|[0-9]+`)

// addProcesses adds all processes by their command lines, and zombies by their
// names. Between two looks a process may end; then there is nothing to add.
func addProcesses(s snapshot) {
	for _, pid := range machine.Processes() {
		stat := strings.Join(machine.ReadLines(fmt.Sprintf("/proc/%d/stat", pid)), "")
		end := strings.LastIndexByte(stat, ')')
		if end < 0 {
			continue
		}
		switch fields := strings.Fields(stat[end+1:]); {
		case fields[0] == "Z":
			s.add("zombie", stat[strings.IndexByte(stat, '('):end+1])
		case !isKernelThread(fields[6]):
			s.add("process", idPattern.ReplaceAllString(machine.CommandLine(pid), "#"))
		}
	}
}

// isKernelThread reads the flags of /proc/PID/stat (PF_KTHREAD). A guest's PID namespace
// holds kernel threads, which come and go as the kernel likes.
func isKernelThread(flags string) bool {
	n, err := strconv.ParseUint(flags, 10, 64)
	return err == nil && n&0x00200000 != 0
}

// addLinks adds the network devices, but for bridges, which their plugin leaves.
func addLinks(s snapshot) {
	links, err := net.Interfaces()
	if err != nil {
		s.add("network device", err.Error())
	}
	for _, l := range links {
		if !strings.HasPrefix(l.Name, "berth") {
			s.add("network device", l.Name)
		}
	}
}

// addRules adds the packet filter's rules, but for portmap's top-level chains,
// which the plugin makes once and leaves.
func addRules(s snapshot, tool string) {
	out, err := exec.CommandContext(context.Background(), tool).Output()
	if err != nil {
		s.add("packet filter", fmt.Sprintf("%s: %v", tool, err))
	}
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		perPod := strings.Contains(line, "CNI-DN-") || regexp.MustCompile(`CNI-[0-9a-f]{24}`).MatchString(line)
		if perPod {
			s.add("packet filter", tool+": "+line)
		}
	}
}

// addCgroups adds the cgroups below the machine's own, but for the pods' own,
// which in this place of kubelet we made, and anywhere those named after one of the daemon's objects.
func addCgroups(s snapshot, d *Daemon) {
	for _, root := range cgroupRoots(d) {
		addCgroupsBelow(s, d, root)
	}
}

// cgroupRoots is where there can be cgroups of the daemon's. Without objects that is below the machine's own
// only, which is a small part where many work side by side.
func cgroupRoots(d *Daemon) []string {
	if d != nil && len(d.Objects) > 0 || SystemdDriver() {
		return []string{"/sys/fs/cgroup"}
	}
	var roots []string
	for _, pattern := range []string{"/sys/fs/cgroup" + machineGroup(), "/sys/fs/cgroup/*" + machineGroup()} {
		found, _ := filepath.Glob(pattern) // the pattern is well-formed
		roots = append(roots, found...)
	}
	return roots
}

// machinePrefix begins the names of all machines' cgroups (contrib/lib.sh).
const machinePrefix = "berth-machine-"

func addCgroupsBelow(s snapshot, d *Daemon, root string) {
	_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil // gone already, or a file
		}
		if strings.HasPrefix(entry.Name(), machinePrefix) && entry.Name() != filepath.Base(machineGroup()) {
			return fs.SkipDir // of tests that run beside these, perhaps thousands
		}
		_, below, ours := strings.Cut(path, machineGroup()+"/")
		switch {
		case ours && (strings.Contains(below, "/") || !strings.HasPrefix(below, podPrefix())):
			s.add("cgroup", path)
		case !ours && d != nil && slices.ContainsFunc(d.Objects, func(id string) bool { return strings.Contains(path, id) }):
			s.add("cgroup", path)
		}
		return nil
	})
}

// addAddresses adds host-local's reservations: files whose name is an address.
func addAddresses(s snapshot, dataDir string) {
	for _, network := range machine.ReadDir(dataDir) {
		for _, name := range machine.ReadDir(filepath.Join(dataDir, network)) {
			if net.ParseIP(name) != nil {
				s.add("CNI address", network+"/"+name)
			}
		}
	}
}

func addTree(s snapshot, kind, root string) {
	_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			s.add(kind, idPattern.ReplaceAllString(strings.TrimPrefix(path, root), "#"))
		}
		return nil
	})
}

// OpenFiles describes what the process's file descriptors refer to.
func OpenFiles(pid int) []string {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	var out []string
	for _, fd := range machine.ReadDir(dir) {
		if target, err := os.Readlink(filepath.Join(dir, fd)); err == nil {
			out = append(out, idPattern.ReplaceAllString(target, "#"))
		}
	}
	return out
}

// Held takes what the daemon and the machine hold, and returns what later tells of everything
// there is more of. Some things end a moment after the call that asks for it, so both looks
// are repeated.
func (d *Daemon) Held(t *testing.T) (grown func(t *testing.T) []string) {
	t.Helper()
	before := d.settled(t)
	return func(t *testing.T) (diff []string) {
		t.Helper()
		_ = WaitUpTo(leakPatience, func() error {
			if diff = d.Snapshot(t).Grown(before); len(diff) > 0 {
				return fmt.Errorf("%d differences", len(diff))
			}
			return nil
		})
		return Summary(diff)
	}
}

// settled takes snapshots until two, one after the other, are the same.
func (d *Daemon) settled(t *testing.T) snapshot {
	t.Helper()
	last := d.Snapshot(t)
	_ = WaitUpTo(leakPatience, func() error {
		before := last
		last = d.Snapshot(t)
		if len(before.Grown(last))+len(last.Grown(before)) > 0 {
			return fmt.Errorf("it changes")
		}
		return nil
	})
	return last
}

// Memory returns the daemon's resident memory, in kB.
func (d *Daemon) Memory(t *testing.T) (kilobytes int) {
	t.Helper()
	_, err := fmt.Sscan(machine.StatusField(t, d.Cmd.Process.Pid, "VmRSS"), &kilobytes)
	Must(t, err)
	return kilobytes
}

// Heap is what the daemon says of its memory, in bytes.
type Heap struct{ InUse, Collections, Taken, Limit uint64 }

// Heap asks the daemon for it.
func (d *Daemon) Heap(t *testing.T) (heap Heap) {
	t.Helper()
	status, err := d.Cri.Status(context.Background(), true)
	Must(t, err)
	Must(t, json.Unmarshal([]byte(status.Info["heap"]), &heap))
	return heap
}

// HeapInUse returns how many bytes of the daemon's heap are in use, garbage not counted. What is garbage now has been
// collected by then: answers to verbose Status make new garbage, so asking for it drives the collector. What is made while it
// works counts as in use, so it is the least of several collections.
func (d *Daemon) HeapInUse(t *testing.T) (bytes uint64) {
	t.Helper()
	const emptiesPools, looks = 3, 6 // collections; the first may be under way, and what is pooled outlives one more
	first := d.Heap(t).Collections
	bytes = math.MaxUint64
	Eventually(t, "garbage is collected", func() error {
		for range 100 {
			heap := d.Heap(t)
			if heap.Collections >= first+emptiesPools {
				bytes = min(bytes, heap.InUse)
			}
			if heap.Collections >= first+emptiesPools+looks {
				return nil
			}
		}
		return fmt.Errorf("not %d times", emptiesPools+looks)
	})
	return bytes
}

// PodCount is how many configurations of pods and containers were made.
func (d *Daemon) PodCount() int { return int(d.pods.Load()) }

// Goroutines asks the daemon how many it has.
func (d *Daemon) Goroutines(t *testing.T) int {
	t.Helper()
	status, err := d.Cri.Status(context.Background(), true)
	Must(t, err)
	n, err := strconv.Atoi(status.Info["goroutines"])
	if err != nil {
		t.Fatalf("verbose Status does not tell the number of goroutines: info is %v", status.Info)
	}
	return n
}
