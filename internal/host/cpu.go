package host

import (
	"os"
	"slices"
	"strings"
)

// CPUFeatures returns the flags of the first processor in /proc/cpuinfo, sorted.
func CPUFeatures() ([]string, error) {
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(data)) {
		name, flags, found := strings.Cut(line, ":")
		if name = strings.TrimSpace(name); found && (name == "flags" || name == "Features") {
			list := strings.Fields(flags)
			slices.Sort(list)
			return list, nil
		}
	}
	return nil, nil
}
