package inventory

import (
	"maps"
	"regexp"
	"slices"
	"testing"

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
