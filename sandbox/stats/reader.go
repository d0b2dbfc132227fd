package stats

import (
	"errors"
	"iter"
	"log/slog"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/internal/lograte"
	"berth/oci"
	"berth/sandbox/state"
)

// ContainerUsage is what a container uses.
type ContainerUsage struct {
	Info    *state.Container
	Running bool    // else Usage is empty
	Cgroup  string  // its path below the cgroup mounts
	Usage   Usage   // Tasks is counted only where the pod has no cgroup
	Sample  *Sample // nil until the first one
}

// PodUsage is what a pod uses.
type PodUsage struct {
	Info       *state.Pod
	Running    bool // else all but Containers is empty
	Usage      Usage
	Cgroup     string              // its path below the cgroup mounts; of its pause where it has none
	Interfaces []cgstats.Interface // the default one first; none with the host's network
	Containers []ContainerUsage    // those that run
}

// Meters finds what measures pods and containers. It waits for nobody.
type Meters interface {
	// ContainerMeter returns that of a container, nil if it does not run, and how much it had written when that was counted last.
	ContainerMeter(id string) (m *ContainerMeter, cgroupsPath string, count *Sample)
	// PodMeter returns that of a pod, nil if it does not run, and the pod's own cgroup, or that of its pause if it has none.
	PodMeter(id string) (m *PodMeter, cgroup string)
}

// Reader measures pods and containers.
type Reader struct {
	meters     Meters
	unmeasured lograte.Limiter // warnings of containers that can't be measured
	log        *slog.Logger
}

// NewReader returns what measures by these meters.
func NewReader(meters Meters, log *slog.Logger) *Reader { return &Reader{meters: meters, log: log} }

// ContainerStats measures a container. One that does not run, or ends meanwhile,
// is no error. It reads the kernel's files and waits for nobody.
func (s *Reader) ContainerStats(info *state.Container) (ContainerUsage, error) {
	used := ContainerUsage{Info: info}
	measured, cgroupsPath, count := s.meters.ContainerMeter(info.ID)
	used.Sample = count
	if measured == nil {
		return used, nil
	}
	err := measured.Read(&used.Usage)
	if errors.Is(err, cgstats.ErrGone) {
		return used, nil
	}
	used.Running, used.Cgroup = err == nil, oci.CgroupPath(cgroupsPath)
	return used, err
}

// ContainerDetail reads what only metrics need of a container that runs. One that
// does not, or ends meanwhile, has none: nil.
func (s *Reader) ContainerDetail(id string) (*cgstats.Detail, error) {
	measured, _, _ := s.meters.ContainerMeter(id)
	if measured == nil {
		return nil, nil
	}
	detail, err := measured.Detail()
	if errors.Is(err, cgstats.ErrGone) {
		return nil, nil
	}
	return detail, err
}

// PodStats measures a pod; containers are its containers. A pod that is not ready,
// or ends meanwhile, is no error. It reads the kernel's files and waits for nobody.
//
// The pod's figures are those of the cgroup its config names, which kubelet makes
// for each pod. Without one they are the sum of pause and containers; of those that have ended since the daemon
// began, what they used. A container that can't be measured is left out.
func (s *Reader) PodStats(info *state.Pod, containers []*state.Container) (PodUsage, error) {
	used := PodUsage{Info: info}
	measured, cgroup := s.meters.PodMeter(info.ID)
	var past *cgstats.Sample
	if measured != nil {
		past = measured.Past() // before the containers
	}
	for _, c := range containers {
		if c.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
			continue
		}
		one, err := s.ContainerStats(c)
		if err != nil {
			s.unmeasured.Warn(s.log, "a container can't be measured", "container", c.ID, "error", err)
		}
		if one.Running {
			used.Containers = append(used.Containers, one)
		}
	}
	if measured == nil {
		return used, nil
	}
	var err error
	used.Interfaces, err = measured.Read(&used.Usage, past, usages(used.Containers))
	if errors.Is(err, cgstats.ErrGone) {
		return PodUsage{Info: info, Containers: used.Containers}, nil
	}
	used.Running, used.Cgroup = err == nil, cgroup
	return used, err
}

func usages(containers []ContainerUsage) iter.Seq[*Usage] {
	return func(yield func(*Usage) bool) {
		for i := range containers {
			if !yield(&containers[i].Usage) {
				return
			}
		}
	}
}
