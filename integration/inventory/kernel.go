package inventory

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"berth/integration/machine"
)

// peerGroup matches the number of a mount's peer group in /proc/PID/mountinfo.
var peerGroup = regexp.MustCompile(`:\d+`)

// addMountOptions adds the source, options and propagation of each mount that a process sees.
func addMountOptions(s Items, what string, pid int) {
	for _, line := range machine.ReadLines(fmt.Sprintf("/proc/%d/mountinfo", pid)) {
		here, super, _ := strings.Cut(line, " - ")
		fields := strings.Fields(here) // ID, parent, device, root, mount point, options, propagation…
		propagation := peerGroup.ReplaceAllString(strings.Join(fields[6:], ","), "")
		s.Add("options "+what, fmt.Sprintf("%s of %s: %s %s %s", normalized(fields[4]), normalized(fields[3]), fields[5], propagation, super))
	}
}

// limits lists the files with limits of a cgroup.
var limits = []string{
	// version 1
	"memory.limit_in_bytes", "memory.soft_limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.swappiness",
	"cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "devices.list", "freezer.state",
	// version 2
	"memory.max", "memory.high", "memory.min", "memory.low", "memory.swap.max", "memory.oom.group", "cpu.max", "cpu.weight", "cgroup.freeze",
	"cgroup.subtree_control",
	// both
	"pids.max", "cpuset.cpus", "cpuset.mems",
}

// addLimits adds the limits of cgroups.
func addLimits(s Items, cgroups []string) {
	for _, dir := range cgroups {
		for _, name := range limits {
			if value, err := os.ReadFile(filepath.Join(dir, name)); err == nil { // otherwise the file belongs to another controller
				s.Add("limit of cgroup", fmt.Sprintf("%s %q", normalized(filepath.Join(dir, name)), value))
			}
		}
	}
}

// addAllRules adds all chains and rules of the packet filter.
func addAllRules(s Items) {
	for _, tool := range []string{"iptables-save", "ip6tables-save"} {
		out, err := exec.CommandContext(context.Background(), tool).Output()
		if err != nil {
			s.Add("rule", fmt.Sprintf("%s: %v", tool, err))
		}
		for line := range strings.Lines(string(out)) {
			if !strings.HasPrefix(line, "#") { // comments contain the time of day
				s.Add("rule", tool+": "+normalized(strings.TrimSpace(line)))
			}
		}
	}
}

// addDescriptors adds the daemon's open descriptors, without mounts of images. The daemon creates
// these on first use and keeps them with the image, so a new daemon has fewer. OfDaemon counts
// them.
func addDescriptors(s Items, pid int, systemd bool) {
	const kind = "fd of the daemon"
	for _, target := range OpenFiles(pid) {
		dbus := systemd && target == "socket:[#]" // connections opened with the first cgroup and kept open
		if !dbus && target != imageMount && !madeOnce[kind+": "+target] {
			s.Add(kind, target)
		}
	}
}
