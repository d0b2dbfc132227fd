package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"path"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgstats"
	"berth/internal/diskusage"
	"berth/internal/lograte"
	"berth/internal/task"
	"berth/oci"
	"berth/sandbox/state"
	"berth/sandbox/stats"
)

// meters measure pods and containers. They implement stats.Meters.
type meters struct {
	objects    objects
	node       state.Node
	sampler    *stats.Sampler
	oomKills   oomCounter
	unmeasured lograte.Limiter // rate limit of warnings about usage that cannot be read
	tasks      *task.Runner
	log        *slog.Logger
}

func newMeters(cfg Config, p *parts, all objects, tasks *task.Runner) *meters {
	s := &meters{objects: all, node: p.node, tasks: tasks, log: cfg.Log}
	s.sampler = stats.NewSampler(stats.SamplerConfig{
		Node:    p.node,
		Period:  cfg.SamplePeriod,
		Targets: s.targets,
		Layers:  p.node.Writable(""),
		Images:  p.imageRoot,
		Begin:   tasks.BeginOpen,
		Log:     cfg.Log,
		Quota:   func(project uint32) (diskusage.Usage, bool, error) { return p.quotas.Usage(project) },
	})
	return s
}

// ContainerMeter returns the meter, cgroupsPath and last layer sample of a container.
func (s *meters) ContainerMeter(id string) (measured *stats.ContainerMeter, cgroupsPath string, count *stats.Sample) {
	c, known := s.objects.containers.Get(id)
	if !known {
		return nil, "", nil
	}
	if run := c.running.Load(); run != nil {
		measured = run.meter
	}
	return measured, c.CgroupsPath, s.sampler.Last(&c.sample)
}

// PodMeter returns the meter and cgroup of a pod.
func (s *meters) PodMeter(id string) (measured *stats.PodMeter, cgroup string) {
	p, known := s.objects.pods.Get(id)
	if !known {
		return nil, ""
	}
	cgroup = oci.CgroupPath(p.CgroupsPath)
	if p.HasCgroup() {
		cgroup = path.Dir(cgroup)
	}
	return p.meter.Load(), cgroup
}

// openContainer opens the meter of a container's cgroup. For a container of a sandboxing runtime it
// is empty, because all processes are in the pause's cgroup. Zeros would look like measurements.
// The sampler asks the runtime if that Measures.
func (s *meters) openContainer(c *container) *stats.ContainerMeter {
	p, known := s.objects.pods.Get(c.PodID)
	if known && p.Sandboxed() {
		return &stats.ContainerMeter{}
	}
	return stats.Cgroups{Node: s.node}.ContainerMeter(c.CgroupsPath, known && !p.HasCgroup())
}

// keepUsage adds the usage of an exited container to its pod. The caller has published the exit,
// and the cgroup still exists.
func (s *meters) keepUsage(c *container, run *running) {
	p, known := s.objects.pods.Get(c.PodID)
	if !known {
		return
	}
	measured := p.meter.Load()
	if measured == nil { // the pause has exited too
		return
	}
	if err := measured.Ended(run.meter); err != nil && !errors.Is(err, cgstats.ErrGone) {
		s.unmeasured.Warn(s.log, "read the final usage of a container", "container", c.ID, "error", err)
	}
}

// openPod opens the meter of a pod whose pause runs. It reads interfaces in the pinned namespace,
// because the pause process of a sandboxing runtime is in the node's namespace.
func (s *meters) openPod(p *pod) *stats.PodMeter {
	return stats.Cgroups{Node: s.node}.PodMeter(p.CgroupsPath, p.HasCgroup(), p.NetNS)
}

// start locates the writable layers and starts the sampler.
func (s *meters) start() error {
	if err := s.sampler.Locate(); err != nil {
		return err
	}
	s.tasks.Watchers.Spawn(func() { s.sampler.Run(s.tasks.Watchers.Context()) })
	return nil
}

// targets is an iter.Seq of the containers to measure.
func (s *meters) targets(yield func(stats.Target) bool) {
	for id, c := range s.objects.containers.Snapshot() {
		info := c.info.Load()
		if info == nil {
			continue
		}
		t := stats.Target{ID: id, State: &c.sample, Running: info.State() == runtimeapi.ContainerState_CONTAINER_RUNNING,
			FinishedAt: info.Ended().FinishedAt, CgroupsPath: c.CgroupsPath, Project: c.Project}
		p, known := s.objects.pods.Get(c.PodID)
		switch run := c.running.Load(); {
		case !known || run == nil:
		case !p.Sandboxed():
			t.Init = run.PID
		case p.Runtime.Measures && !run.HasEnded():
			t.Usage = func(ctx context.Context) ([]byte, error) { return p.Runtime.Usage(ctx, id) }
		}
		if !yield(t) {
			return
		}
	}
}
