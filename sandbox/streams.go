package sandbox

import "berth/sandbox/streams"

// streamTargets is the manager as streams see it.
type streamTargets struct{ m *Manager }

// StreamContainer implements streams.Targets.
func (t streamTargets) StreamContainer(id string) (streams.Container, error) {
	c, err := t.m.containers.Find(id)
	if err != nil {
		return streams.Container{}, err
	}
	run := c.running.Load()
	return streams.Container{ID: c.id, PodID: c.podID, Process: c.info.Load().Process, Runtime: t.m.runtimeOf(c), Cgroup: c.rec.CgroupsPath,
		Terminal: c.config.GetTty(), Stdin: c.config.GetStdin(), Running: run != nil && !run.HasEnded()}, nil
}

// StreamPod implements streams.Targets.
func (t streamTargets) StreamPod(id string) (streams.Pod, error) {
	info, err := t.m.Pod(id)
	if err != nil {
		return streams.Pod{}, err
	}
	return streams.Pod{ID: info.ID, NetNS: info.NetNS, Ready: info.Ready, Sandboxed: info.Sandboxed}, nil
}
