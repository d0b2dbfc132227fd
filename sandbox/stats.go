package sandbox

import (
	"errors"
	"path"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/oci"
	"berth/sandbox/stats"
)

// meters finds what measures pods and containers.
type meters struct {
	objects
	sampler *stats.Sampler
}

// ContainerMeter implements stats.Meters.
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

// PodMeter implements stats.Meters.
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

// containerMeter measures a container's cgroup. That of a Sandboxed runtime's is empty:
// all its containers are in the cgroup of the pause, and their zeros would look measured.
func (m *Manager) containerMeter(c *container) *stats.ContainerMeter {
	p, known := m.pods.Get(c.PodID)
	if known && p.Sandboxed() {
		return &stats.ContainerMeter{}
	}
	return m.cgroups().ContainerMeter(c.CgroupsPath, known && !p.HasCgroup())
}

// keepUsage adds the usage of an exited container to its pod. The container is no longer published
// as running, and its cgroup still exists.
func (m *Manager) keepUsage(c *container, run *running) {
	p, known := m.pods.Get(c.PodID)
	if !known {
		return
	}
	measured := p.meter.Load()
	if measured == nil { // the pod has ended too
		return
	}
	if err := measured.Ended(run.meter); err != nil && !errors.Is(err, cgstats.ErrGone) {
		m.unmeasured.Warn(m.log, "what a container has used is not known", "container", c.ID, "error", err)
	}
}

// podMeter measures a pod whose pause runs. It reads interfaces in the pinned namespace, because
// the process of a sandboxing runtime's pause is in the node's.
func (m *Manager) podMeter(p *pod) *stats.PodMeter {
	return m.cgroups().PodMeter(p.CgroupsPath, p.HasCgroup(), p.NetNS)
}

func (m *Manager) cgroups() stats.Cgroups {
	return stats.Cgroups{V2: m.host.CgroupV2, Systemd: m.cfg.SystemdCgroup}
}

// startSampler finds out where writable layers are and starts to count.
func (m *Manager) startSampler() error {
	if err := m.sampler.Locate(); err != nil {
		return err
	}
	m.tasks.Watchers.Spawn(func() { m.sampler.Run(m.tasks.Watchers.Context()) })
	return nil
}

// sampleTargets is an iter.Seq.
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
