package sandbox

import (
	"errors"
	"path"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/oci"
	"berth/sandbox/stats"
)

// meters implements stats.Meters.
type meters struct {
	objects
	sampler *stats.Sampler
}

// ContainerMeter returns the meter, cgroupsPath and last layer sample of a container.
func (s meters) ContainerMeter(id string) (measured *stats.ContainerMeter, cgroupsPath string, count *stats.Sample) {
	c, known := s.containers.Get(id)
	if !known {
		return nil, "", nil
	}
	if run := c.running.Load(); run != nil {
		measured = run.meter
	}
	return measured, c.CgroupsPath, s.sampler.Last(&c.sample)
}

// PodMeter returns the meter and cgroup of a pod.
func (s meters) PodMeter(id string) (measured *stats.PodMeter, cgroup string) {
	p, known := s.pods.Get(id)
	if !known {
		return nil, ""
	}
	cgroup = oci.CgroupPath(p.CgroupsPath)
	if p.HasCgroup() {
		cgroup = path.Dir(cgroup)
	}
	return p.meter.Load(), cgroup
}

// containerMeter opens the meter of a container's cgroup. For a container of a sandboxing runtime
// it is empty: all processes are in the pause's cgroup, and zeros would look like measurements.
func (m *Manager) containerMeter(c *container) *stats.ContainerMeter {
	p, known := m.pods.Get(c.PodID)
	if known && p.Sandboxed() {
		return &stats.ContainerMeter{}
	}
	return m.cgroups().ContainerMeter(c.CgroupsPath, known && !p.HasCgroup())
}

// keepUsage adds the usage of an exited container to its pod. The caller has published the exit,
// and the cgroup still exists.
func (m *Manager) keepUsage(c *container, run *running) {
	p, known := m.pods.Get(c.PodID)
	if !known {
		return
	}
	measured := p.meter.Load()
	if measured == nil { // the pause has exited too
		return
	}
	if err := measured.Ended(run.meter); err != nil && !errors.Is(err, cgstats.ErrGone) {
		m.unmeasured.Warn(m.log, "read the final usage of a container", "container", c.ID, "error", err)
	}
}

// podMeter opens the meter of a pod whose pause runs. It reads interfaces in the pinned namespace,
// because the pause process of a sandboxing runtime is in the node's namespace.
func (m *Manager) podMeter(p *pod) *stats.PodMeter {
	return m.cgroups().PodMeter(p.CgroupsPath, p.HasCgroup(), p.NetNS)
}

func (m *Manager) cgroups() stats.Cgroups {
	return stats.Cgroups{V2: m.host.CgroupV2, Systemd: m.cfg.SystemdCgroup}
}

// startSampler locates the writable layers and starts the sampler.
func (m *Manager) startSampler() error {
	if err := m.sampler.Locate(); err != nil {
		return err
	}
	m.tasks.Watchers.Spawn(func() { m.sampler.Run(m.tasks.Watchers.Context()) })
	return nil
}

// sampleTargets is an iter.Seq of the containers to measure.
func (m *Manager) sampleTargets(yield func(stats.Target) bool) {
	for id, c := range m.containers.Snapshot() {
		info := c.info.Load()
		if info == nil {
			continue
		}
		s := stats.Target{ID: id, State: &c.sample, Running: info.State() == runtimeapi.ContainerState_CONTAINER_RUNNING,
			FinishedAt: info.Ended().FinishedAt, CgroupsPath: c.CgroupsPath, Project: c.Project}
		if p, known := m.pods.Get(c.PodID); known && !p.Sandboxed() {
			if run := c.running.Load(); run != nil {
				s.Init = run.PID
			}
		}
		if !yield(s) {
			return
		}
	}
}

// WritableFilesystem returns the filesystem of the writable layers and their usage, from memory.
func (m *Manager) WritableFilesystem() stats.Filesystem { return m.sampler.Filesystem() }
