package statecheck

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"berth/oci"
	"berth/sandbox/state"
)

// Processes: each process in berth's cgroups, each launcher and each monitor belongs to a recorded
// object that may have processes. Each process in the cgroup of a CNI plugin belongs to a recorded
// run. If an object runs according to its record, its process exists. The object's record or its
// shim's record identifies the process by ID and start time.

// process is a process with the attributes that the checks need.
type process struct {
	pid, parent int
	start       uint64 // in clock ticks since boot
	ended       bool   // a zombie
	name        string
	exe         string   // empty for kernel threads
	groups      []string // its cgroups, without duplicates
}

func (p *process) String() string { return fmt.Sprintf("process %d (%s)", p.pid, p.name) }

func (p *process) isLauncher() bool { return strings.HasPrefix(p.exe, "/memfd:berth-shim") }
func (p *process) isMonitor() bool {
	return strings.TrimSuffix(path.Base(p.exe), " (deleted)") == "berth-monitor"
}

// monitorOf reports whether the process is a monitor installed by a daemon with this root.
func (p *process) monitorOf(root string) bool {
	return p.isMonitor() && strings.HasPrefix(p.exe, filepath.Join(root, "bin")+"/")
}

func (f *facts) readProcesses() error {
	names, err := namesIn(f.node.proc)
	if err != nil {
		return fmt.Errorf("read processes: %w", err)
	}
	f.processes = map[int]*process{}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p := f.readProcess(pid); p != nil {
			f.processes[pid] = p
		}
	}
	return nil
}

// readProcess returns nil for a process that is gone.
func (f *facts) readProcess(pid int) *process {
	dir := strconv.Itoa(pid)
	stat, err := f.readProc(dir, "stat")
	if err != nil {
		return nil
	}
	p, kernel := parseStat(pid, stat)
	if p == nil || kernel || p.ended {
		return p
	}
	p.exe, _ = os.Readlink(f.procFile(dir, "exe"))    // empty if it is gone by now
	groups, _ := f.readProc(dir, "cgroup")            // empty if it is gone by now
	for line := range strings.Lines(string(groups)) { // hierarchy:controllers:path
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) == 3 && !slices.Contains(p.groups, fields[2]) {
			p.groups = append(p.groups, fields[2])
		}
	}
	return p
}

// parseStat parses proc_pid_stat(5). The name may contain anything, so fields are counted after the
// last parenthesis.
func parseStat(pid int, stat []byte) (p *process, kernel bool) {
	const state, ppid, flags, starttime, kthread = 0, 1, 6, 19, 0x00200000
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end < open {
		return nil, false
	}
	fields := strings.Fields(string(stat[end+1:]))
	if len(fields) <= starttime {
		return nil, false
	}
	p = &process{pid: pid, name: string(stat[open+1 : end]), ended: strings.Contains("ZX", fields[state])}
	p.parent, _ = strconv.Atoi(fields[ppid]) // the kernel writes numbers
	bits, _ := strconv.ParseUint(fields[flags], 10, 64)
	p.start, _ = strconv.ParseUint(fields[starttime], 10, 64)
	return p, bits&kthread != 0
}

// alive returns the process with this ID and start time, or nil.
func (f *facts) alive(pid int, start uint64) *process {
	if p := f.processes[pid]; p != nil && p.start == start && !p.ended {
		return p
	}
	return nil
}

func compareProcesses(f *facts, d *finder) {
	for _, p := range f.processes {
		f.compareMember(d, p)
		f.compareLauncher(d, p)
		f.compareMonitor(d, p)
		f.comparePlugin(d, p)
	}
	for _, p := range f.pods {
		f.comparePause(d, p)
	}
	for _, c := range f.containers {
		f.compareInit(d, c)
	}
}

// compareMember compares a process in the cgroup of an object.
func (f *facts) compareMember(d *finder, p *process) {
	id := f.groupOf(p)
	pod, container := f.pods[id], f.containers[id]
	switch {
	case id == "":
	case pod != nil && f.podIsOver(pod):
		d.differ(podName(id), "no process of a pod that was stopped", "%s", p)
	case container != nil && f.containerIsIdle(container):
		d.differ(containerName(id), "no process of a container that does not run", "%s", p)
	case !f.known(id) && !f.others[id] && (f.isOurGroup(id, p) || f.isOrphan(id, p)):
		d.differ(p.String(), "the pod or container in its cgroup's name", "no record of %s", id)
	}
}

// groupOf returns the ID in the name of a process's cgroup, preferably of a recorded object. It
// returns "" for a process outside such cgroups, or if this process is in the same cgroup.
func (f *facts) groupOf(p *process) string {
	var found string
	for _, group := range p.groups {
		for _, id := range idsIn(group) {
			if f.known(id) {
				return id
			}
			if !f.around(id) {
				found = id
			}
		}
	}
	return found
}

// around reports whether this process itself is in a cgroup with that ID. That is so if berth runs
// in a container.
func (f *facts) around(id string) bool {
	self := f.processes[os.Getpid()]
	return self != nil && slices.ContainsFunc(self.groups, func(g string) bool { return slices.Contains(idsIn(g), id) })
}

// idsIn returns the IDs in a cgroup's path, in the forms of berth's drivers: ID and berth-ID.scope.
func idsIn(group string) []string {
	var ids []string
	for part := range strings.SplitSeq(group, "/") {
		if id := strings.TrimSuffix(strings.TrimPrefix(part, scopePrefix), ".scope"); isID(id) {
			ids = append(ids, id)
		}
	}
	return ids
}

const scopePrefix = "berth-"

// isOurGroup reports whether a group is in a place that berth uses.
func (f *facts) isOurGroup(id string, p *process) bool {
	for _, group := range p.groups {
		at := strings.Index(group, id)
		if at < 0 {
			continue
		}
		if strings.HasSuffix(group[:at], "/"+scopePrefix) || strings.HasSuffix(group[:at], oci.DefaultCgroupParent+"/") ||
			f.isParent(group[:at]) {
			return true
		}
	}
	return false
}

// isParent reports whether recorded objects have groups in dir.
func (f *facts) isParent(dir string) bool {
	is := func(cgroupsPath string) bool {
		parent := path.Dir(oci.CgroupPath(cgroupsPath))
		return parent != "/" && strings.HasSuffix(dir, parent+"/")
	}
	for _, p := range f.pods {
		if is(p.CgroupsPath) {
			return true
		}
	}
	for _, c := range f.containers {
		if is(c.CgroupsPath) {
			return true
		}
	}
	return false
}

// isOrphan reports whether nobody else looks after the processes of a group. It looks for an
// ancestor outside of the group that is neither PID 1 nor a process of this berth. Containers of
// another runtime have that runtime's shim.
func (f *facts) isOrphan(id string, p *process) bool {
	for {
		parent := f.processes[p.parent]
		if parent == nil || parent.pid == 1 || parent.monitorOf(f.node.Root) ||
			parent.isLauncher() && parent.parent == f.daemon {
			return true
		}
		if !slices.ContainsFunc(parent.groups, func(g string) bool { return strings.Contains(g, id) }) {
			return false
		}
		p = parent
	}
}

// comparePlugin compares a process that a CNI plugin of the daemon has started.
func (f *facts) comparePlugin(d *finder, p *process) {
	for _, group := range p.groups {
		if run := f.runs.Unnoted(group); run != "" && !p.ended {
			d.differ(p.String(), "a record of the CNI plugin's run in its cgroup's name", "none of %s", run)
		}
	}
}

// compareLauncher compares a launcher. A launcher exits with its daemon, unless berth-stream has
// its exec. During a launch, it first hands over to a monitor or undoes the launch.
func (f *facts) compareLauncher(d *finder, p *process) {
	if !p.isLauncher() || p.parent == f.daemon || f.isRecordedShim(p) {
		return
	}
	parent := f.processes[p.parent]
	if (parent == nil || parent.pid == 1) && !f.hasSessions() {
		d.differ(p.String(), "the daemon that started it", "a launcher whose daemon has ended")
	}
}

// hasSessions reports whether a process of sessions runs.
func (f *facts) hasSessions() bool {
	for _, p := range f.processes {
		if p.name == "berth-stream" {
			return true
		}
	}
	return false
}

// compareMonitor compares a monitor that was installed below root. Until it begins, the record
// names the launcher that has started it.
func (f *facts) compareMonitor(d *finder, p *process) {
	if launcher := f.processes[p.parent]; launcher != nil && f.isRecordedShim(launcher) {
		return
	}
	if p.monitorOf(f.node.Root) && !f.isRecordedShim(p) {
		d.differ(p.String(), "a recorded container with a shim directory that names it", "a monitor without a shim record")
	}
}

// isRecordedShim reports whether the shim directory of a recorded object names the process.
func (f *facts) isRecordedShim(p *process) bool {
	for id, s := range f.shims {
		if f.known(id) && s.launched.MonitorPID == p.pid && s.launched.MonitorStartTime == p.start {
			return true
		}
	}
	return false
}

func (f *facts) comparePause(d *finder, p *state.FoundPod) {
	if !f.podRuns(p) || f.alive(p.PausePID, p.PauseStart) != nil {
		return
	}
	if f.views != nil && !f.views.isReady(p.ID) { // its record is written when the pod is stopped
		return
	}
	d.differ(podName(p.ID), fmt.Sprintf("its pause, process %d", p.PausePID), "no such process")
}

// compareInit compares a container that was started by its record. Everything else is in its shim
// directory.
func (f *facts) compareInit(d *finder, c *state.FoundContainer) {
	if !f.containerRuns(c) {
		return
	}
	s, name := f.shims[c.ID], containerName(c.ID)
	switch {
	case s == nil || s.launched == (noLaunch): // not launched yet, or the launch never happened
		if f.views != nil && f.views.runs(c.ID) {
			d.differ(name, "the shim record of a running container", "none")
		}
	case f.alive(s.launched.MonitorPID, s.launched.MonitorStartTime) != nil:
		if s.launched.InitPID != 0 && s.exit != nil && f.alive(s.launched.InitPID, s.launched.InitStartTime) == nil {
			d.differ(name, fmt.Sprintf("its init, process %d, or an exit record", s.launched.InitPID),
				"neither, and a monitor (process %d) that does not record the exit", s.launched.MonitorPID)
		}
	case s.exit == nil: // an exit record exists
		if f.daemon != 0 {
			d.differ(name, "a record of its exit by the daemon", "an exit record, and the container recorded as running")
		}
	case f.daemon != 0 || s.launched.InitPID != 0:
		d.differ(name, fmt.Sprintf("its monitor, process %d, or an exit record", s.launched.MonitorPID), "neither (%v)", s.exit)
	}
}
