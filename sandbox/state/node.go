package state

import (
	"berth/internal/cgroup"
	"berth/internal/host"
	"berth/oci"
)

// Node is what a daemon decides once for all its pods and containers. It never changes.
type Node struct {
	Dirs
	Host          host.Facts
	SystemdCgroup bool         // cgroup driver: systemd, else cgroupfs; cgroup paths then name systemd scopes
	OwnDevices    bool         // devices belong to the user and group of the security context
	Defaults      oci.Defaults // of all containers
	CDI           []string     // directories of CDI device specs
	PauseCPUs     string       // CPUs of pauses; empty: all
	CRIU          string       // path of CRIU, or a name in PATH; empty: criu
}

// CgroupsPath returns the cgroupsPath in the runtime-spec of a pause or container with that ID.
// parent is the cgroup parent of the pod's config.
func (n Node) CgroupsPath(parent, id string) (string, error) {
	return oci.CgroupsPath(parent, id, n.SystemdCgroup)
}

// Cgroup opens the cgroup of a pause or container. cgroupsPath is the path in its runtime-spec. The
// cgroup need not exist.
func (n Node) Cgroup(cgroupsPath string) (*cgroup.Group, error) {
	return cgroup.Open(cgroupsPath, n.SystemdCgroup)
}
