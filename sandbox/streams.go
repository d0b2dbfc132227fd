package sandbox

import "berth/sandbox/stream"

// streamTargets is the manager as streams see it.
type streamTargets struct{ m *Manager }

// StreamContainer implements stream.Targets.
func (t streamTargets) StreamContainer(id string) (stream.ContainerTarget, error) {
	c, err := t.m.containers.Find(id)
	if err != nil {
		return stream.ContainerTarget{}, err
	}
	run := c.running.Load()
	return stream.ContainerTarget{ID: c.ID, PodID: c.PodID, Process: c.info.Load().Process, Runtime: t.m.runtimeOf(c), Cgroup: c.CgroupsPath,
		Terminal: c.Config.GetTty(), Stdin: c.Config.GetStdin(), Running: run != nil && !run.HasEnded()}, nil
}

// StreamPod implements stream.Targets.
func (t streamTargets) StreamPod(id string) (stream.PodTarget, error) {
	info, err := t.m.Pod(id)
	if err != nil {
		return stream.PodTarget{}, err
	}
	return stream.PodTarget{ID: info.ID, NetNS: info.NetNS, Ready: info.Ready(), Sandboxed: info.Sandboxed()}, nil
}
