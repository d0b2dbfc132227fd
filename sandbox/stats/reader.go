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

// ContainerUsage is the resource usage of a container.
type ContainerUsage struct {
	Info    *state.Container
	Running bool    // if false, Usage is empty
	Cgroup  string  // path below the cgroup mounts
	Usage   Usage   // Tasks is counted only if the pod has no cgroup
	Sample  *Sample // nil before the first sample

	sandboxed bool // Usage is part of the pause's
}

// PodUsage is the resource usage of a pod.
type PodUsage struct {
	Info       *state.Pod
	Running    bool // if false, only Containers is set
	Usage      Usage
	Cgroup     string              // path below the cgroup mounts; the pause's if the pod has none
	Interfaces []cgstats.Interface // the default interface first; none on the host's network
	Containers []ContainerUsage    // only running containers
}

// Meters finds the meters of pods and containers. Its methods do not block.
type Meters interface {
	// ContainerMeter returns the meter of a container, nil if it does not run, and its last sample.
	ContainerMeter(id string) (m *ContainerMeter, cgroupsPath string, count *Sample)
	// PodMeter returns the meter of a pod, or nil if the pod does not run. cgroup is the path of
	// the pod's cgroup, or of the pause's cgroup if the pod has none.
	PodMeter(id string) (m *PodMeter, cgroup string)
}

// Reader returns the resource usage of pods and containers.
type Reader struct {
	meters     Meters
	unmeasured lograte.Limiter // limits warnings about containers that cannot be measured
	log        *slog.Logger
}

// NewReader returns a Reader that uses these meters.
func NewReader(meters Meters, log *slog.Logger) *Reader { return &Reader{meters: meters, log: log} }

// ContainerStats measures a container. A container that does not run, or exits during the call, is
// no error. It reads only files of the kernel and does not block.
func (s *Reader) ContainerStats(info *state.Container) (ContainerUsage, error) {
	used := ContainerUsage{Info: info}
	measured, cgroupsPath, count := s.meters.ContainerMeter(info.ID)
	used.Sample = count
	if measured == nil {
		return used, nil
	}
	used.sandboxed = measured.isSandboxed()
	err := measured.read(&used.Usage, count)
	if errors.Is(err, cgstats.ErrGone) {
		return used, nil
	}
	used.Running, used.Cgroup = err == nil, oci.CgroupPath(cgroupsPath)
	return used, err
}

// ContainerDetail reads the counters that only metrics need. It returns nil for a container that
// does not run.
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

// PodStats measures a pod and its containers. A pod that is not ready, or stops during the call, is
// no error. It reads only files of the kernel and does not block.
//
// If the config names the pod's cgroup, which kubelet creates, the pod's usage is the usage of that
// cgroup. Otherwise it is the sum of the pause, the running containers, and the containers that
// exited since the daemon started. A container that cannot be measured is left out.
func (s *Reader) PodStats(info *state.Pod, containers []*state.Container) (PodUsage, error) {
	used := PodUsage{Info: info}
	measured, cgroup := s.meters.PodMeter(info.ID)
	var past *cgstats.Sample
	if measured != nil {
		past = measured.Past() // must precede the containers, see Past
	}
	for _, c := range containers {
		if c.State() != runtimeapi.ContainerState_CONTAINER_RUNNING {
			continue
		}
		one, err := s.ContainerStats(c)
		if err != nil {
			s.unmeasured.Warn(s.log, "measure container", "container", c.ID, "error", err)
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
			if !containers[i].sandboxed && !yield(&containers[i].Usage) {
				return
			}
		}
	}
}
