package launcher

import (
	"encoding/json"
	"io"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer/specconv"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// warm does work in advance for which the first launch would wait, and which is done once for each
// process. encoding/json analyses the types of libcontainer's configuration, and package cgroups
// opens the root of the cgroups. warm does nothing that the launch would do again. A failure here
// appears again, with an error, in the launch.
func warm() {
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{CgroupName: "warm", Spec: sampleSpec()})
	if err == nil {
		_ = json.NewEncoder(io.Discard).Encode(config)
	}
	_, _ = cgroups.ReadFile("/sys/fs/cgroup", "cgroup.procs")
}

// sampleSpec returns a spec with all parts of a container's.
func sampleSpec() *specs.Spec {
	caps := []string{"CAP_CHOWN"}
	number := int64(1)
	return &specs.Spec{
		Process: &specs.Process{
			Args:         []string{"/bin/true"},
			Cwd:          "/",
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
			Rlimits:      []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: 1, Soft: 1}},
		},
		Root: &specs.Root{Path: "/"},
		Mounts: []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc",
			Options: []string{"nosuid", "rbind", "rprivate"}}},
		Linux: &specs.Linux{
			CgroupsPath: "/berth-warm", // only the name is used
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}},
			Resources: &specs.LinuxResources{
				Devices: []specs.LinuxDeviceCgroup{{Access: "rwm"}},
				Memory:  &specs.LinuxMemory{Limit: &number},
				Pids:    &specs.LinuxPids{Limit: &number},
			},
			Seccomp: &specs.LinuxSeccomp{
				DefaultAction: specs.ActErrno,
				Syscalls:      []specs.LinuxSyscall{{Names: []string{"read", "write"}, Action: specs.ActAllow}},
			},
			MaskedPaths:   []string{"/proc/kcore"},
			ReadonlyPaths: []string{"/proc/sys"},
		},
	}
}
