package nodecheck

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// controllers that kubelet requires.
var controllers = []string{"cpu", "memory", "pids", "cpuset"}

func checkCgroups(_ context.Context, n *Node) []Finding {
	findings := []Finding{n.checkDriver()}
	if !n.Facts.CgroupV2 {
		findings = append(findings, lacking(Warning, "cgroups", "version 1",
			"boot with systemd.unified_cgroup_hierarchy=1: kubelet refuses version 1 unless it has failCgroupV1: false"))
	} else {
		findings = append(findings, ok("cgroups", "version 2"))
	}
	present, err := n.controllers()
	if err != nil {
		return append(findings, lacking(Failure, "cgroup controllers", err.Error(), "mount the cgroup file systems"))
	}
	var missing []string
	for _, c := range controllers {
		if !slices.Contains(present, c) {
			missing = append(missing, c)
		}
	}
	if len(missing) > 0 {
		return append(findings, lacking(
			Failure,
			"cgroup controllers",
			strings.Join(missing, ", ")+" missing",
			"enable them on the kernel's command line (cgroup_enable=memory and the like) or in the parent's cgroup.subtree_control",
		))
	}
	findings = append(findings, ok("cgroup controllers", "%s", strings.Join(present, ", ")))
	if !n.Facts.SwapAccounting {
		findings = append(
			findings,
			lacking(
				Warning,
				"swap accounting",
				"off",
				"swapaccount=1 on the kernel's command line; without it limits of swap do nothing",
			),
		)
	}
	return findings
}

// checkDriver compares the cgroup driver with PID 1.
func (n *Node) checkDriver() Finding {
	driver := "cgroupfs"
	if n.SystemdCgroup {
		driver = "systemd"
	}
	systemd := n.exists("/run/systemd/system") // sd_booted(3)
	switch {
	case n.SystemdCgroup && !systemd:
		return lacking(Failure, "cgroup driver", "systemd, but systemd is not PID 1", `set cgroup_driver = "cgroupfs"`)
	case !n.SystemdCgroup && systemd && n.Facts.CgroupV2:
		return lacking(Warning, "cgroup driver", "cgroupfs, although systemd manages cgroups too",
			`set cgroup_driver = "systemd", and cgroupDriver: systemd for kubelet`)
	}
	return ok("cgroup driver", "%s; kubelet queries it", driver)
}

// controllers lists the controllers that containers can use.
func (n *Node) controllers() ([]string, error) {
	if n.Facts.CgroupV2 {
		text, err := n.value("/sys/fs/cgroup/cgroup.controllers")
		return strings.Fields(text), err
	}
	text, err := n.value("/proc/cgroups")
	if err != nil {
		return nil, err
	}
	var enabled []string
	for line := range strings.Lines(text) {
		// name, hierarchy, number of cgroups, enabled
		if f := strings.Fields(line); len(f) == 4 && f[3] == "1" && f[1] != "0" {
			enabled = append(enabled, f[0])
		}
	}
	if len(enabled) == 0 {
		return nil, fmt.Errorf("no cgroup controller is mounted")
	}
	return enabled, nil
}
