package sandbox

import (
	"errors"
	"iter"
	"path"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/oci"
	"berth/sandbox/census"
	"berth/sandbox/meter"
	"berth/sandbox/view"
)

// ContainerStats is what a container uses.
type ContainerStats struct {
	Info    *view.Container
	Running bool          // else Usage is empty
	Cgroup  string        // its path below the cgroup mounts
	Usage   meter.Usage   // Tasks is counted only where the pod has no cgroup
	Census  *census.Count // nil until the first one
}

// PodStats is what a pod uses.
type PodStats struct {
	Info       *view.Pod
	Running    bool // else all but Containers is empty
	Usage      meter.Usage
	Cgroup     string              // its path below the cgroup mounts; of its pause where it has none
	Interfaces []cgstats.Interface // the default one first; none with the host's network
	Containers []ContainerStats    // those that run
}

// ContainerStats measures a container. One that does not run, or ends meanwhile,
// is no error. It reads the kernel's files and waits for nobody.
func (m *Manager) ContainerStats(info *view.Container) (ContainerStats, error) {
	stats := ContainerStats{Info: info}
	c, known := m.containers.Get(info.ID)
	if !known {
		return stats, nil
	}
	stats.Census = c.census.Last()
	run := c.running.Load()
	if run == nil {
		return stats, nil
	}
	err := run.meter.Read(&stats.Usage)
	if errors.Is(err, cgstats.ErrGone) {
		return stats, nil
	}
	stats.Running, stats.Cgroup = err == nil, oci.CgroupPath(c.rec.CgroupsPath)
	return stats, err
}

// ContainerDetail reads what only metrics need of a container that runs. One that
// does not, or ends meanwhile, has none: nil.
func (m *Manager) ContainerDetail(id string) (*cgstats.Detail, error) {
	c, known := m.containers.Get(id)
	if !known {
		return nil, nil
	}
	run := c.running.Load()
	if run == nil {
		return nil, nil
	}
	detail, err := run.meter.Detail()
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
func (m *Manager) PodStats(info *view.Pod, containers []*view.Container) (PodStats, error) {
	stats := PodStats{Info: info}
	var measured *meter.Pod
	var past *cgstats.Sample
	p, known := m.pods.Get(info.ID)
	if known {
		measured = p.meter.Load()
	}
	if measured != nil {
		past = measured.Past() // before the containers
	}
	for _, c := range containers {
		if c.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
			continue
		}
		one, err := m.ContainerStats(c)
		if err != nil {
			m.unmeasured.Warn(m.log, "a container can't be measured", "container", c.ID, "error", err)
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
		return PodStats{Info: info, Containers: stats.Containers}, nil
	}
	stats.Running, stats.Cgroup = err == nil, oci.CgroupPath(p.rec.CgroupsPath)
	if p.hasCgroup() {
		stats.Cgroup = path.Dir(stats.Cgroup)
	}
	return stats, err
}

func usages(containers []ContainerStats) iter.Seq[*meter.Usage] {
	return func(yield func(*meter.Usage) bool) {
		for i := range containers {
			if !yield(&containers[i].Usage) {
				return
			}
		}
	}
}

// containerMeter measures a container's cgroup. That of a Sandboxed runtime's is empty:
// all its containers are in the cgroup of the pause, and their zeros would look measured.
func (m *Manager) containerMeter(c *container) *meter.Container {
	p, known := m.pods.Get(c.podID)
	if known && p.sandboxed() {
		return &meter.Container{}
	}
	return m.cgroups().Container(c.rec.CgroupsPath, known && !p.hasCgroup())
}

// keepUsage adds to its pod what a container has used that has ended. It must not run any more for those who
// measure the pod, and its cgroup must be there.
func (m *Manager) keepUsage(c *container, run *running) {
	p, known := m.pods.Get(c.podID)
	if !known {
		return
	}
	measured := p.meter.Load()
	if measured == nil { // the pod has ended too
		return
	}
	if err := measured.Ended(run.meter); err != nil && !errors.Is(err, cgstats.ErrGone) {
		m.unmeasured.Warn(m.log, "what a container has used is not known", "container", c.id, "error", err)
	}
}

// podMeter measures a pod whose pause runs. The network is that of the pinned namespace: the process
// of a Sandboxed runtime's pause is in the node's.
func (m *Manager) podMeter(p *pod) *meter.Pod {
	return m.cgroups().Pod(p.rec.CgroupsPath, p.hasCgroup(), p.rec.NetNS)
}

func (m *Manager) cgroups() meter.Cgroups {
	return meter.Cgroups{V2: m.cfg.Host.CgroupV2, Systemd: m.cfg.SystemdCgroup}
}

// sandboxed tells whether the pod's containers run where the node can't see them.
func (p *pod) sandboxed() bool { return p.rec.Runtime.IsSandboxed() }

// hasCgroup tells whether the pod has a cgroup, to be its containers' parent.
func (p *pod) hasCgroup() bool { return p.config.GetLinux().GetCgroupParent() != "" }

// openCensus finds out where writable layers are and starts to count.
func (m *Manager) openCensus() error {
	if err := m.census.Locate(); err != nil {
		return err
	}
	m.tasks.Watchers.Spawn(func() { m.census.Run(m.tasks.Watchers.Context()) })
	return nil
}

// newCensus returns the counter of the containers that are visible.
func (m *Manager) newCensus() *census.Counter {
	return census.New(census.Config{Period: m.cfg.CensusPeriod, Subjects: m.censusSubjects, Layers: m.dirs.Writable(""),
		Images: m.images.Root(), SystemdCgroup: m.cfg.SystemdCgroup, Begin: m.tasks.BeginOpen, Log: m.log})
}

// censusSubjects is an iter.Seq.
func (m *Manager) censusSubjects(yield func(census.Subject) bool) {
	for id, c := range m.containers.Snapshot() {
		info := c.info.Load()
		if info == nil {
			continue
		}
		s := census.Subject{ID: id, Ledger: &c.census, Running: info.State == runtimeapi.ContainerState_CONTAINER_RUNNING,
			FinishedAt: info.FinishedAt, CgroupsPath: c.rec.CgroupsPath}
		if p, known := m.pods.Get(c.podID); known && !p.sandboxed() {
			if run := c.running.Load(); run != nil {
				s.Init = run.PID
			}
		}
		if !yield(s) {
			return
		}
	}
}

// WritableFilesystem returns where writable layers are and what they take there,
// from memory.
func (m *Manager) WritableFilesystem() census.Filesystem { return m.census.Filesystem() }
