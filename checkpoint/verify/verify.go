// Package verify compares the CRIU images of a checkpointed container with what berth would create.
//
// # Contract
//
// CRIU restores whatever its images say, with root's privileges on the host. Container reads the
// images of one container, which may come from anyone, and names each difference from the expected
// runtime-spec. It finds no difference only if CRIU would restore nothing that the spec does not
// permit: processes with at most its users, capabilities and limits, with its seccomp filter,
// no_new_privs and security labels, in its namespaces and cgroup, with its mounts, and with open
// files inside the container. What the package does not know is a difference: an unknown image,
// kind of file or field.
//
// The mounts must be exactly those of the spec: each mount point once, below the mount above it,
// with known flags, and with a device of its own. Cgroups must be the ones that CRIU replaces by
// the container's in every hierarchy.
//
// Layer and Shm check the files of a foreign archive. A container's writable layer has a
// set-user-ID or set-group-ID file only if the container's user owns it, or with CAP_CHOWN,
// CAP_SETUID or CAP_SETGID; file capabilities with CAP_SETFCAP; devices with CAP_MKNOD; other
// attributes than user.*, these and access lists never. Directories keep their bits: overlayfs
// copies them from the image. /dev/shm and the filesystems that CRIU fills (tmpfs) have no set-id
// files, whatever the capabilities.
//
// Memory and content of files are not compared: whoever wrote the images decides what the processes
// do within these limits.
//
// The package reads regular files of one directory, within limits, and opens nothing that an image
// names. It runs in the confined program berth-verify (package confined), so it uses few system
// calls. The differences are a result: an error means that the images could not be read.
//
// It is separate from package archive because it is linked into that program.
package verify

import (
	"fmt"
	"os"
	"strconv"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// Expected is what a restored container may have at most.
type Expected struct {
	// Spec is what CreateContainer would give to the launcher.
	Spec *specs.Spec `json:"spec"`
	// Seccomp is the filter that the launcher would load for Spec.Linux.Seccomp: struct
	// sock_filter, little-endian. nil: Spec has no filter.
	Seccomp []byte `json:"seccomp,omitempty"`
	// Rlimits are the limits of a launcher. They count where Spec.Process.Rlimits has none.
	Rlimits []specs.POSIXRlimit `json:"rlimits,omitempty"`
	// ExternalFiles are keys that CRIU gets a descriptor for (inherit_fd), for the standard
	// streams.
	ExternalFiles []string `json:"externalFiles,omitempty"`
	// AbsentPaths are masked and read-only paths of Spec that this kernel does not have. See
	// AbsentPaths.
	AbsentPaths []string `json:"absentPaths,omitempty"`
	// Cgroups are the controllers and hierarchies of the node. See NodeCgroups.
	Cgroups []string `json:"cgroups,omitempty"`
	// CgroupOptions are the options of the node's cgroup filesystem, version 2. See
	// host.CgroupOptions.
	CgroupOptions []string `json:"cgroupOptions,omitempty"`
	// UnprivilegedPort is the first port that needs no capability, in the pod's network.
	UnprivilegedPort uint32 `json:"unprivilegedPort,omitempty"`
	// Memory limits the sum of private and shared memory, in bytes; 0: no limit.
	Memory int64 `json:"memory,omitempty"`
}

// Difference is something that the images have and the spec does not permit.
type Difference struct {
	Field    string `json:"field"`    // such as "process 7: capabilities"
	Archive  string `json:"archive"`  // what the archive has
	Expected string `json:"expected"` // what is permitted
}

func (d Difference) String() string {
	return d.Field + ": the checkpoint has " + d.Archive + ", permitted is " + d.Expected
}

// Report is the result of a comparison.
type Report struct {
	Differences []Difference `json:"differences,omitempty"` // the first 64
	More        int          `json:"more,omitempty"`        // number of further differences
	Processes   []Process    `json:"processes"`             // the first 1000, in the order of the images
	Sockets     []string     `json:"sockets,omitempty"`     // the first 1000 sockets with addresses
	Memory      int64        `json:"memory"`                // bytes in page images
	OpenFiles   int          `json:"openFiles"`
}

// Process is a process of the images.
type Process struct {
	PID     uint32 `json:"pid"` // in the container's PID namespace
	Parent  uint32 `json:"parent,omitempty"`
	Command string `json:"command"`
	UID     uint32 `json:"uid"`
	GID     uint32 `json:"gid"`
	Threads int    `json:"threads"`
}

// Limits of a report.
const (
	maxDifferences = 64
	maxListed      = 1000
	maxText        = 200 // bytes of a value in a difference
)

// differ records a difference.
func (r *Report) differ(field, archive, expected string) {
	if len(r.Differences) == maxDifferences {
		r.More++
		return
	}
	r.Differences = append(r.Differences, Difference{clip(field), clip(archive), clip(expected)})
}

// clip returns a printable text of limited length.
func clip(s string) string {
	if quoted := strconv.QuoteToASCII(s); quoted != `"`+s+`"` {
		s = quoted
	}
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	return s
}

// check is the state of a comparison.
type check struct {
	*Report
	images *images
	e      Expected

	criuIDs *criu_core.TaskKobjIdsEntry // namespaces of the CRIU that made the images: the node's
	tree    []*pstree.PstreeEntry       // not empty
	first   *criu_core.TaskKobjIdsEntry // namespaces of the first process
	files   map[uint32]file
	mounts  map[int32]bool  // IDs of the mounts that the spec has
	cgroups map[uint32]bool // IDs of cgroup sets that lead to the container's cgroup
	filters []filter
}

// Container compares the images in the directory dir with what is expected.
func Container(dir *os.File, e Expected) (*Report, error) {
	if e.Spec == nil || e.Spec.Process == nil || e.Spec.Linux == nil || e.Spec.Root == nil {
		return nil, fmt.Errorf("the expected spec is not complete")
	}
	ims, err := openImages(dir)
	if err != nil {
		return nil, err
	}
	c := &check{Report: new(Report), images: ims, e: e}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"names", c.checkNames},
		{"inventory", c.checkInventory},
		{"cgroups", c.checkCgroups},
		{"mounts", c.checkMounts},
		{"seccomp filters", c.readFilters},
		{"open files", c.checkFiles},
		{"processes", c.checkProcesses},
		{"memory", c.checkMemory},
		{"shared memory", c.checkShared},
		{"tmpfs", c.checkTmpfs},
		{"standard streams", c.checkStreams},
	} {
		if err := step.do(); err != nil {
			return nil, fmt.Errorf("read images of %s: %w", step.name, err)
		}
	}
	for _, name := range c.images.unread() {
		c.differ("image "+name, "a kind that berth does not know", "none")
	}
	for _, name := range c.images.unknown {
		c.differ("image "+name, "fields that berth does not know", "none")
	}
	return c.Report, nil
}
