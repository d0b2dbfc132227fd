package sandbox

import (
	"berth/sandbox/stream"
	"berth/sandbox/stream/copying"
)

// streamTargets finds containers and pods for streams.
type streamTargets struct {
	objects objects
	images  Images
}

// StreamContainer implements stream.Targets.
func (t streamTargets) StreamContainer(id string) (stream.ContainerTarget, error) {
	c, err := t.objects.containers.Find(id)
	if err != nil {
		return stream.ContainerTarget{}, err
	}
	run := c.running.Load()
	return stream.ContainerTarget{
		ID:      c.ID,
		PodID:   c.PodID,
		Process: c.info.Load().Process,
		Runtime: t.objects.runtimeOf(c),
		Cgroup:  c.CgroupsPath,
		Target: copying.Target{Terminal: c.Config.GetTty(), Stdin: c.Config.GetStdin(),
			StdinOnce: c.Config.GetStdinOnce()},
		Running: run != nil && !run.HasEnded(),
		Keep:    keepFor(t.images, c.ContainerSpec),
	}, nil
}

// StreamPod implements stream.Targets.
func (t streamTargets) StreamPod(id string) (stream.PodTarget, error) {
	p, err := t.objects.pods.Find(id)
	if err != nil {
		return stream.PodTarget{}, err
	}
	info := p.Info()
	return stream.PodTarget{ID: info.ID, NetNS: info.NetNS, Ready: info.Ready(), Sandboxed: info.Sandboxed()}, nil
}
