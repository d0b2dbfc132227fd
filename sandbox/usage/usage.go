// Package usage is what pods and containers use, as clients are told.
//
// # Contract
//
// It reads the kernel's files, through meters that are open, and waits for nobody. What does not run, or ends meanwhile, is
// no error: it uses nothing. A container that can't be measured does not hide its pod.
package usage

import (
	"errors"
	"iter"
	"log/slog"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/internal/seldom"
	"berth/oci"
	"berth/sandbox/census"
	"berth/sandbox/meter"
	"berth/sandbox/view"
)

// Container is what a container uses.
type Container struct {
	Info    *view.Container
	Running bool          // else Usage is empty
	Cgroup  string        // its path below the cgroup mounts
	Usage   meter.Usage   // Tasks is counted only where the pod has no cgroup
	Census  *census.Count // nil until the first one
}

// Pod is what a pod uses.
type Pod struct {
	Info       *view.Pod
	Running    bool // else all but Containers is empty
	Usage      meter.Usage
	Cgroup     string              // its path below the cgroup mounts; of its pause where it has none
	Interfaces []cgstats.Interface // the default one first; none with the host's network
	Containers []Container         // those that run
}

// Meters finds what measures pods and containers. It waits for nobody.
type Meters interface {
	// ContainerMeter returns that of a container, nil if it does not run, and how much it had written when that was counted last.
	ContainerMeter(id string) (m *meter.Container, cgroupsPath string, count *census.Count)
	// PodMeter returns that of a pod, nil if it does not run, and the pod's own cgroup, or that of its pause if it has none.
	PodMeter(id string) (m *meter.Pod, cgroup string)
}

// Statistics measure pods and containers.
type Statistics struct {
	meters     Meters
	unmeasured seldom.Seldom // warnings of containers that can't be measured
	log        *slog.Logger
}

// New returns what measures by these meters.
func New(meters Meters, log *slog.Logger) *Statistics { return &Statistics{meters: meters, log: log} }

// ContainerStats measures a container. One that does not run, or ends meanwhile,
// is no error. It reads the kernel's files and waits for nobody.
func (s *Statistics) ContainerStats(info *view.Container) (Container, error) {
	stats := Container{Info: info}
	measured, cgroupsPath, count := s.meters.ContainerMeter(info.ID)
	stats.Census = count
	if measured == nil {
		return stats, nil
	}
	err := measured.Read(&stats.Usage)
	if errors.Is(err, cgstats.ErrGone) {
		return stats, nil
	}
	stats.Running, stats.Cgroup = err == nil, oci.CgroupPath(cgroupsPath)
	return stats, err
}

// ContainerDetail reads what only metrics need of a container that runs. One that
// does not, or ends meanwhile, has none: nil.
func (s *Statistics) ContainerDetail(id string) (*cgstats.Detail, error) {
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
func (s *Statistics) PodStats(info *view.Pod, containers []*view.Container) (Pod, error) {
	stats := Pod{Info: info}
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
			stats.Containers = append(stats.Containers, one)
		}
	}
	if measured == nil {
		return stats, nil
	}
	var err error
	stats.Interfaces, err = measured.Read(&stats.Usage, past, usages(stats.Containers))
	if errors.Is(err, cgstats.ErrGone) {
		return Pod{Info: info, Containers: stats.Containers}, nil
	}
	stats.Running, stats.Cgroup = err == nil, cgroup
	return stats, err
}

func usages(containers []Container) iter.Seq[*meter.Usage] {
	return func(yield func(*meter.Usage) bool) {
		for i := range containers {
			if !yield(&containers[i].Usage) {
				return
			}
		}
	}
}
