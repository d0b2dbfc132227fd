package inventory

import (
	"maps"
	"regexp"
	"slices"
	"testing"

	"berth/integration/machine"
)

// Everything takes all that there is of a daemon, whose process is pid, and of its pods, containers and images on the machine: processes, mounts with their options, namespaces, devices, the packet filter's rules, cgroups with their limits,
// addresses, files with all that can be seen of them, records, logs, the daemon's descriptors. What has to differ
// between two runs of the same requests is made equal: IDs, addresses, times. What the
// daemon tells of itself is not part of it.
func Everything(t *testing.T, groups Cgroups, d *Daemon, pid int) Items {
	t.Helper()
	s := Items{}
	outside := OfMachine(groups, d)
	for kind, names := range outside {
		for name, n := range names {
			for range n {
				s.Add(kind, alike(name))
			}
		}
	}
	for _, m := range machine.Mountpoints(t, pid) {
		s.Add("mount of the daemon", alike(m))
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

// alike makes names equal that differ in IDs, addresses and numbers.
func alike(name string) string {
	return idPattern.ReplaceAllString(deviceName.ReplaceAllString(name, "$1#"), "#")
}
