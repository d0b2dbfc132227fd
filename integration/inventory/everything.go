package inventory

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"berth/integration/machine"
)

// Everything takes a complete inventory of a daemon, its pods, containers and images. pid is the
// daemon's process. The inventory covers processes, mounts with their options, namespaces, devices,
// packet filter rules, cgroups with their limits, addresses, files with their metadata, records,
// logs and the daemon's descriptors. It replaces IDs, addresses and times, which differ between two
// runs of the same requests. It leaves out the answers of the daemon's API.
func Everything(t *testing.T, groups Cgroups, d *Daemon, pid int) Items {
	t.Helper()
	s := Items{}
	outside := OfMachine(groups, d)
	for kind, names := range outside {
		for name, n := range names {
			for range n {
				s.Add(kind, normalized(name))
			}
		}
	}
	for _, m := range machine.Mountpoints(t, pid) {
		s.Add("mount of the daemon", normalized(m))
	}
	addMountOptions(s, "of mount", 1)
	addMountOptions(s, "of mount of the daemon", pid)
	addLimits(s, slices.Collect(maps.Keys(outside["cgroup"])))
	addAllRules(s)
	addDescriptors(s, pid, groups.Systemd)
	addFiles(s, "below root", d.Root, rootPlaces)
	addFiles(s, "below state", d.State, statePlaces)
	addFiles(s, "of logs", d.Logs, logPlaces)
	return s
}

var deviceName = regexp.MustCompile(`(veth|vifb)[0-9a-f]{8,11}`)

// normalized replaces IDs, addresses and numbers in a name, so that names of two runs are equal.
func normalized(name string) string {
	return idPattern.ReplaceAllString(deviceName.ReplaceAllString(name, "$1#"), "#")
}

// differs lists the parts of CRI messages that differ in each run.
var differs = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`(^|[^:]|[^6]:)[0-9a-f]{64}`), "$1#"},      // IDs of pods and containers, not digests (sha256:)
	{regexp.MustCompile(`"\d{19}"`), `"T"`},                        // times in nanoseconds
	{regexp.MustCompile(`"\d{4}-\d\d-\d\dT[^"]*"`), `"T"`},         // and in words
	{regexp.MustCompile(`,"(attempt|podSandboxAttempt)":\d+`), ""}, // counts of retries
	{regexp.MustCompile(`\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b`), "IP"},
	{regexp.MustCompile(`/\d+\.log`), "/#.log"},
	{regexp.MustCompile(`/proc/\d+/`), "/proc/#/"},
}

// AddMessage adds a message without the parts that differ in each run.
func (s Items) AddMessage(kind string, m proto.Message) error {
	text, err := compact(m)
	if err != nil {
		return err
	}
	s.Add(kind, withoutDiffering(text))
	return nil
}

func withoutDiffering(text string) string {
	for _, d := range differs {
		text = d.pattern.ReplaceAllString(text, d.with)
	}
	return text
}

// compact returns a message as compact JSON.
func compact(m proto.Message) (string, error) {
	data, err := protojson.Marshal(m)
	if err != nil {
		return "", err
	}
	var text bytes.Buffer // protojson adds random blanks
	err = json.Compact(&text, data)
	return text.String(), err
}

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
