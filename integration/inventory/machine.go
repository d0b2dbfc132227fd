package inventory

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/cni/berthnet/rules"
	"berth/integration/machine"
)

// Cgroups describes the location of the pods' cgroups.
type Cgroups struct {
	Group     string // contains all of them; belongs to this machine alone
	PodPrefix string // prefix of the names of the pods' cgroups
	Systemd   bool   // systemd manages them
}

// Daemon identifies the daemon of an inventory.
type Daemon struct {
	Root, State, Logs string   // its directories
	Addresses         string   // host-local's directory of the pods' addresses
	Objects           []string // IDs of all created pods and containers
}

// OfDaemon takes an inventory of the machine and of a daemon. pid is the daemon's process.
func OfDaemon(t *testing.T, groups Cgroups, d *Daemon, pid int) Items {
	t.Helper()
	s := OfMachine(groups, d)
	for _, m := range machine.Mountpoints(t, pid) {
		s.Add("mount of the daemon", m)
	}
	for _, fd := range OpenFiles(pid) {
		s.Add("fd of the daemon", fd)
	}
	addTree(s, "file below root", d.Root)
	addTree(s, "file below state", d.State)
	return s
}

// OfMachine takes an inventory of the machine alone. d provides the directory of addresses, and the
// objects whose cgroups may be anywhere. It may be nil.
func OfMachine(groups Cgroups, d *Daemon) Items {
	s := Items{}
	addProcesses(s)
	for _, m := range machine.ReadLines("/proc/1/mountinfo") {
		s.Add("mount", strings.Fields(m)[4])
	}
	for _, name := range machine.ReadDir("/run/netns") {
		s.Add("network namespace", name)
	}
	for _, pin := range machine.NamespacePins("user:") {
		s.Add("pinned user namespace", pin)
	}
	for _, pid := range machine.Processes() {
		if link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", pid)); err == nil {
			s.Add("user namespace of processes", link)
			s["user namespace of processes"][link] = 1
		}
	}
	addLinks(s)
	addRules(s, "iptables-save")
	addRules(s, "ip6tables-save")
	addHostPorts(s)
	addCgroups(s, groups, d)
	if d != nil {
		addAddresses(s, d.Addresses)
		addAddresses(s, filepath.Join(d.Root, "network"))
	}
	return s
}

// idPattern matches numbers that differ between two processes of the same kind.
var idPattern = regexp.MustCompile(`[0-9a-f]{12,}|[0-9]+`)

// addProcesses adds all processes by their command lines, and zombies by their names. It skips
// processes that exit meanwhile.
func addProcesses(s Items) {
	for _, pid := range machine.Processes() {
		stat := strings.Join(machine.ReadLines(fmt.Sprintf("/proc/%d/stat", pid)), "")
		end := strings.LastIndexByte(stat, ')')
		if end < 0 {
			continue
		}
		switch fields := strings.Fields(stat[end+1:]); {
		case fields[0] == "Z":
			s.Add("zombie", stat[strings.IndexByte(stat, '('):end+1])
		case !isKernelThread(fields[6]):
			s.Add("process", processName(pid))
		}
	}
}

// isKernelThread checks the flags of /proc/PID/stat (PF_KTHREAD). A guest's PID namespace contains
// kernel threads, which the kernel starts and ends at any time.
func isKernelThread(flags string) bool {
	n, err := strconv.ParseUint(flags, 10, 64)
	return err == nil && n&0x00200000 != 0
}

// addLinks adds the network devices except bridges, which their plugin does not remove.
func addLinks(s Items) {
	links, err := net.Interfaces()
	if err != nil {
		s.Add("network device", err.Error())
	}
	for _, l := range links {
		if !strings.HasPrefix(l.Name, "berth") {
			s.Add("network device", l.Name)
		}
	}
}

// addRules adds the packet filter rules except portmap's top-level chains, which the plugin does
// not remove.
func addRules(s Items, tool string) {
	out, err := exec.CommandContext(context.Background(), tool).Output()
	if err != nil {
		s.Add("packet filter", fmt.Sprintf("%s: %v", tool, err))
	}
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSpace(line)
		perPod := strings.Contains(line, "CNI-DN-") || regexp.MustCompile(`CNI-[0-9a-f]{24}`).MatchString(line)
		if perPod {
			s.Add("packet filter", tool+": "+line)
		}
	}
}

// processName returns the command line of a process, without IDs and without a launcher's settings,
// which differ between daemons.
func processName(pid int) string {
	line := idPattern.ReplaceAllString(machine.CommandLine(pid), "#")
	const launcher = "berth-shim launcher"
	if strings.HasPrefix(line, launcher+" ") {
		return launcher
	}
	if strings.HasPrefix(line, "runsc-") { // its options are in no particular order
		words := strings.Fields(line)
		slices.Sort(words)
		return strings.Join(words, " ")
	}
	return line
}

// addCgroups adds the cgroups below the machine's own, and all cgroups named after the daemon's
// objects. It leaves out the pods' parents, which the tests create as kubelet does.
func addCgroups(s Items, groups Cgroups, d *Daemon) {
	for _, root := range groups.roots(d) {
		groups.addBelow(s, d, root)
	}
}

// roots returns the directories that may contain cgroups of the daemon. Without objects it returns
// only the machine's own, because other machines may run beside it.
func (g Cgroups) roots(d *Daemon) []string {
	if d != nil && len(d.Objects) > 0 || g.Systemd {
		return []string{"/sys/fs/cgroup"}
	}
	var roots []string
	for _, pattern := range []string{"/sys/fs/cgroup" + g.Group, "/sys/fs/cgroup/*" + g.Group} {
		found, _ := filepath.Glob(pattern) // the pattern is well-formed
		roots = append(roots, found...)
	}
	return roots
}

// machinePrefix is the prefix of the names of all machines' cgroups (contrib/lib.sh).
const machinePrefix = "berth-machine-"

func (g Cgroups) addBelow(s Items, d *Daemon, root string) {
	_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil // removed meanwhile, or a file
		}
		if strings.HasPrefix(entry.Name(), machinePrefix) && entry.Name() != filepath.Base(g.Group) {
			return fs.SkipDir // cgroups of tests that run in parallel, perhaps thousands
		}
		_, below, ours := strings.Cut(path, g.Group+"/")
		switch {
		case ours && (strings.Contains(below, "/") || !strings.HasPrefix(below, g.PodPrefix)):
			s.Add("cgroup", path)
		case !ours && d != nil && slices.ContainsFunc(d.Objects, func(id string) bool { return strings.Contains(path, id) }):
			s.Add("cgroup", path)
		}
		return nil
	})
}

// addHostPorts adds the open host ports of the built-in network.
func addHostPorts(s Items) {
	filter := &rules.Filter{}
	networks, err := filter.Networks()
	for _, key := range networks {
		ports, e := filter.Ports(key)
		err = errors.Join(err, e)
		for _, p := range ports {
			s.Add("host port", p.String())
		}
	}
	if err := errors.Join(err, filter.Close()); err != nil {
		s.Add("host port", err.Error())
	}
}

// addAddresses adds the reserved addresses. The name of host-local's file is the address. The name
// of berth-net's file begins with one or two addresses.
func addAddresses(s Items, dataDir string) {
	for _, network := range machine.ReadDir(dataDir) {
		for _, name := range machine.ReadDir(filepath.Join(dataDir, network)) {
			if addresses, _, own := strings.Cut(name, "@"); own || net.ParseIP(name) != nil {
				s.Add("CNI address", network+"/"+addresses)
			}
		}
	}
}

func addTree(s Items, kind, root string) {
	_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		below := strings.TrimPrefix(path, root)
		if err == nil && !isOutliving(below) {
			s.Add(kind, idPattern.ReplaceAllString(below, "#"))
		}
		return nil
	})
}

// isOutliving reports whether a path below root or state is an index of a blob or part of the
// journal of events. They outlive their pods and images, and are written at any time.
func isOutliving(below string) bool {
	return strings.HasPrefix(below, "/images/indexes/") || strings.HasPrefix(below, "/events/")
}

// imageMount is the description of an EROFS image's mount, which has no name, in OpenFiles.
const imageMount = "a mount of an image"

// OpenFiles describes the files that the process's descriptors refer to.
func OpenFiles(pid int) []string {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	var out []string
	for _, fd := range machine.ReadDir(dir) {
		path := filepath.Join(dir, fd)
		target, err := os.Readlink(path)
		if err != nil {
			continue
		}
		var fs unix.Statfs_t
		if target == "/" && unix.Statfs(path, &fs) == nil {
			switch fs.Type {
			case unix.EROFS_SUPER_MAGIC_V1:
				target = imageMount
			case unix.PROC_SUPER_MAGIC:
				target = ownProc
			}
		}
		out = append(out, idPattern.ReplaceAllString(target, "#"))
	}
	return out
}
