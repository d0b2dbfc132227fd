package verify

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"strings"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	criufs "github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// States of a process in the images.
const (
	alive   = 1
	dead    = 2
	stopped = 3
	zombie  = 6
)

// maxThreads limits all threads of a container's images.
const maxThreads = 1 << 15

// checkProcesses checks all processes and threads.
func (c *check) checkProcesses() error {
	c.checkTree()
	threads := 0
	for _, p := range c.tree {
		threads += max(1, len(p.GetThreads()))
	}
	if threads > maxThreads {
		c.differ("threads", fmt.Sprint(threads), fmt.Sprint(maxThreads))
		return nil // each has an image
	}
	for _, p := range c.tree {
		if err := c.checkProcess(p); err != nil {
			return err
		}
	}
	return nil
}

// checkTree checks that the processes form one tree: every other has a parent before it.
func (c *check) checkTree() {
	seen := map[uint32]bool{}
	for i, p := range c.tree {
		field := fmt.Sprintf("process %d", p.GetPid())
		if i == 0 && p.GetPpid() != 0 {
			c.differ(field+": parent", fmt.Sprint(p.GetPpid()), "none")
		}
		if seen[p.GetPid()] {
			c.differ(field, "two entries", "one")
		}
		if i > 0 && !seen[p.GetPpid()] {
			c.differ(field+": parent", fmt.Sprint(p.GetPpid()), "another process of the container")
		}
		for _, tid := range append([]uint32{p.GetPid()}, p.GetThreads()...) {
			if seen[tid] && tid != p.GetPid() || tid == 0 {
				c.differ(field+": thread", fmt.Sprintf("%d twice", tid), "different IDs")
			}
			seen[tid] = true
		}
	}
}

// checkProcess checks one process with its threads.
func (c *check) checkProcess(p *pstree.PstreeEntry) error {
	process := fmt.Sprintf("process %d", p.GetPid())
	core, err := c.readCore(p.GetPid())
	if err != nil {
		return err
	}
	c.describe(p, core)
	c.checkTask(process, core)
	if state := core.GetTc().GetTaskState(); state == dead || state == zombie {
		return nil // it has no memory, files and rights
	}
	leader := core.GetThreadCore()
	c.checkThread(process, core, leader)
	for _, tid := range p.GetThreads() {
		if tid == p.GetPid() {
			continue
		}
		core, err := c.readCore(tid)
		if err != nil {
			return err
		}
		c.checkThread(fmt.Sprintf("%s, thread %d", process, tid), core, leader)
	}
	ids, err := c.readIDs(p.GetPid())
	if err != nil {
		return err
	}
	c.checkNamespaces(process, ids)
	if err := c.checkDirectories(process, p.GetPid()); err != nil {
		return err
	}
	return c.checkDescriptors(process, ids.GetFilesId())
}

func (c *check) readCore(tid uint32) (*criu_core.CoreEntry, error) {
	return oneOf[criu_core.CoreEntry](c.images, fmt.Sprintf("core-%d.img", tid), "CORE")
}

// describe adds a process to the report.
func (c *check) describe(p *pstree.PstreeEntry, core *criu_core.CoreEntry) {
	if len(c.Processes) == maxListed {
		return
	}
	cr := core.GetThreadCore().GetCreds()
	c.Processes = append(c.Processes, Process{PID: p.GetPid(), Parent: p.GetPpid(), Threads: len(p.GetThreads()),
		Command: clip(core.GetTc().GetComm()), UID: cr.GetUid(), GID: cr.GetGid()})
}

// machines are the architectures of the images by GOARCH.
var machines = map[string]criu_core.CoreEntryMarch{
	"amd64": criu_core.CoreEntry_X86_64, "arm64": criu_core.CoreEntry_AARCH64,
}

// checkTask checks what all threads of a process share.
func (c *check) checkTask(process string, core *criu_core.CoreEntry) {
	if want := machines[runtime.GOARCH]; core.GetMtype() != want {
		c.differ(process+": architecture", core.GetMtype().String(), want.String())
	}
	task := core.GetTc()
	switch task.GetTaskState() {
	case alive, dead, stopped, zombie:
	default:
		c.differ(process+": state", fmt.Sprint(task.GetTaskState()), "running, stopped or dead")
	}
	// The personalities that the default seccomp profile permits.
	if p := task.GetPersonality(); !slices.Contains([]uint32{0, 0x8, 0x20000, 0x20008}, p) {
		c.differ(process+": personality", fmt.Sprintf("%#x", p), "0")
	}
	const unset = 1<<32 - 1
	if id := task.GetLoginuid(); task.Loginuid != nil && id != unset {
		c.differ(process+": login user of the audit log", fmt.Sprint(id), "unset")
	}
	// CRIU before 3.13 stored the first thread's filter here. Later ones prefer it to the thread's
	// own.
	if task.OldSeccompMode != nil || task.OldSeccompFilter != nil {
		c.differ(process+": seccomp", "a filter in the form of an old CRIU", "one of the thread")
	}
	least := int32(0)
	if adj := c.e.Spec.Process.OOMScoreAdj; adj != nil {
		least = int32(*adj)
	}
	if task.OomScoreAdj != nil && task.GetOomScoreAdj() < least && !c.e.may(capability.CAP_SYS_RESOURCE) {
		c.differ(process+": oom_score_adj", fmt.Sprint(task.GetOomScoreAdj()), fmt.Sprintf("%d or more", least))
	}
	if state := task.GetTaskState(); state != dead && state != zombie {
		c.checkRlimits(process, task.GetRlimits())
	}
	for _, timer := range task.GetTimers().GetPosix() {
		c.checkClock(process+": timer", timer.GetClockId())
	}
}

// limitNames are the names of resource limits by their number (RLIMIT_CPU is 0).
var limitNames = []string{"CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS", "LOCKS",
	"SIGPENDING", "MSGQUEUE", "NICE", "RTPRIO", "RTTIME"}

// checkRlimits checks that no limit is missing, which CRIU would not set, or above that of the
// spec.
func (c *check) checkRlimits(process string, have *criu_core.TaskRlimitsEntry) {
	if c.e.may(capability.CAP_SYS_RESOURCE) {
		return
	}
	if n := len(have.GetRlimits()); n != len(limitNames) {
		c.differ(process+": resource limits", fmt.Sprint(n), fmt.Sprint(len(limitNames)))
		return
	}
	for i, l := range have.GetRlimits() {
		name := "RLIMIT_" + limitNames[i]
		is := func(l specs.POSIXRlimit) bool { return l.Type == name }
		limits := c.e.Spec.Process.Rlimits
		at := slices.IndexFunc(limits, is)
		if at < 0 {
			limits = c.e.Rlimits
			at = slices.IndexFunc(limits, is)
		}
		switch {
		case at < 0:
			c.differ(process+": "+name, fmt.Sprint(l.GetMax()), "a limit that berth knows")
		case l.GetMax() > limits[at].Hard || l.GetCur() > l.GetMax():
			c.differ(process+": "+name, fmt.Sprintf("%d:%d", l.GetCur(), l.GetMax()), fmt.Sprintf("at most %d", limits[at].Hard))
		}
	}
}

// checkThread checks the attributes of one thread.
func (c *check) checkThread(thread string, core *criu_core.CoreEntry, leader *criu_core.ThreadCoreEntry) {
	t := core.GetThreadCore()
	if t == nil {
		c.differ(thread, "no credentials", "those of the spec")
		return
	}
	c.checkCreds(thread, t.GetCreds())
	c.checkSeccomp(thread, t, leader)
	set := t.CgSet
	if old := core.GetTc(); old != nil && old.CgSet != nil {
		c.checkCgroupSet(thread, old.CgSet)
		set = cmp.Or(set, old.CgSet)
	}
	if set == nil {
		set = leader.CgSet
	}
	c.checkCgroupSet(thread, set)
	const normal, batch, idle = 0, 3, 5
	if c.e.may(capability.CAP_SYS_NICE) {
		return
	}
	if p := t.GetSchedPolicy(); p != normal && p != batch && p != idle {
		c.differ(thread+": scheduling policy", fmt.Sprint(p), "normal")
	}
	if n := t.GetSchedNice(); n < 0 {
		c.differ(thread+": nice", fmt.Sprint(n), "0 or more")
	}
}

// checkDirectories checks the root and working directory of a process.
func (c *check) checkDirectories(process string, pid uint32) error {
	dirs, err := oneOf[criufs.FsEntry](c.images, fmt.Sprintf("fs-%d.img", pid), "FS")
	if err != nil {
		return err
	}
	for name, id := range map[string]uint32{"working directory": dirs.GetCwdId(), "root directory": dirs.GetRootId()} {
		if f, ok := c.files[id]; !ok || f.kind != fdinfo.FdTypes_REG || f.external {
			c.differ(process+": "+name, "no file of the container", "a directory of the container")
		}
	}
	return nil
}

// checkDescriptors checks the open files of a table of descriptors. Several processes can share it.
func (c *check) checkDescriptors(process string, table uint32) error {
	name := fmt.Sprintf("fdinfo-%d.img", table)
	if c.images.read[name] {
		return nil
	}
	fds, err := entriesOf[fdinfo.FdinfoEntry](c.images, name, "FDINFO", nil)
	if err != nil {
		return err
	}
	c.OpenFiles += len(fds)
	for _, fd := range fds {
		field := fmt.Sprintf("%s: descriptor %d", process, fd.GetFd())
		f, ok := c.files[fd.GetId()]
		if !ok || f.kind != fd.GetType() {
			c.differ(field, strings.ToLower(fd.GetType().String())+" that is not in the images", "a file of the images")
			continue
		}
		const standard = 2
		if f.external && fd.GetFd() > standard {
			c.differ(field, "a file from outside the container", "a file of the container")
		}
		if label := fd.GetXattrSecuritySelinux(); label != "" {
			c.differ(field+": SELinux label", label, "none")
		}
	}
	return nil
}
