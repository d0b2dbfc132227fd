package sandbox

import (
	"cmp"
	"slices"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/nri"
)

// PodInfo is a snapshot of a pod. It is never changed.
type PodInfo struct {
	ID        string
	Config    *runtimeapi.PodSandboxConfig
	Handler   string
	CreatedAt time.Time
	Ready     bool
	IPs       []string // primary first; none with the host's network
	NetNS     string   // path; empty with the host's network
	PausePID  int      // 0 when not Ready
}

// ContainerInfo is a snapshot of a container. It is never changed.
type ContainerInfo struct {
	ID, PodID  string
	Config     *runtimeapi.ContainerConfig
	ImageID    string
	State      runtimeapi.ContainerState
	CreatedAt  time.Time
	StartedAt  time.Time // zero until started
	FinishedAt time.Time // zero until exited
	ExitCode   int32
	Reason     string // Completed, Error, OOMKilled, StartError, ShimLost, Unknown
	Message    string
	LogPath    string // absolute; empty: no log is kept
	PID        int    // of the init, on the host; 0 when not running
	User       *runtimeapi.ContainerUser
	Resources  *runtimeapi.LinuxContainerResources
	StopSignal runtimeapi.Signal
	Mounts     []*runtimeapi.Mount // the config's, with the IDs of images

	process   *specs.Process // what execs derive from
	described *specs.Spec    // what plugins are told, see describe.ForPlugins
	limits    *nri.Limits    // set by plugins
}

// Pod returns the pod with that ID or unique ID prefix; NotFound, or
// InvalidArgument where the prefix fits several.
func (m *Manager) Pod(id string) (*PodInfo, error) {
	p, err := m.pods.Find(id)
	if err != nil {
		return nil, err
	}
	return p.info.Load(), nil
}

// Pods returns all pods, oldest first.
func (m *Manager) Pods() []*PodInfo {
	all := m.pods.Snapshot()
	infos := make([]*PodInfo, 0, len(all))
	for _, p := range all {
		if info := p.info.Load(); info != nil {
			infos = append(infos, info)
		}
	}
	slices.SortFunc(infos, func(a, b *PodInfo) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return infos
}

// Container returns the container with that ID or unique ID prefix; NotFound, or
// InvalidArgument where the prefix fits several.
func (m *Manager) Container(id string) (*ContainerInfo, error) {
	c, err := m.containers.Find(id)
	if err != nil {
		return nil, err
	}
	return c.info.Load(), nil
}

// Containers returns all containers, oldest first.
func (m *Manager) Containers() []*ContainerInfo {
	all := m.containers.Snapshot()
	infos := make([]*ContainerInfo, 0, len(all))
	for _, c := range all {
		if info := c.info.Load(); info != nil {
			infos = append(infos, info)
		}
	}
	slices.SortFunc(infos, byAge)
	return infos
}

// byAge orders containers, the oldest first.
func byAge(a, b *ContainerInfo) int {
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
}
