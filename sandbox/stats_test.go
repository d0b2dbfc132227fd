package sandbox

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/index"
	"berth/sandbox/handler"
	"berth/sandbox/state"
	"berth/sandbox/stats"
	"berth/shim/ociruntime"
)

// The cgroup of a container in a sandbox of its runtime's is there, and empty.
func TestSandboxedContainerHasNoFigures(t *testing.T) {
	m := &Manager{cfg: Config{Host: &host.Facts{}}, sampler: stats.NewSampler(stats.SamplerConfig{}), containers: index.New[*container]("container"), pods: index.New[*pod]("pod")}
	m.Reader = stats.NewReader(meters{m}, nil)
	p := &pod{id: "p", config: &runtimeapi.PodSandboxConfig{}}
	p.rec.Runtime = &handler.Runtime{Runtime: ociruntime.Runtime{Sandboxed: true}}
	m.pods.Put(p.id, p)
	c := &container{id: "c", podID: "p"}
	c.rec.CgroupsPath = "/"
	run := &running{meter: m.containerMeter(c)}
	c.running.Store(run)
	m.containers.Put(c.id, c)
	stats, err := m.ContainerStats(&state.Container{ID: c.id})
	if err != nil || !stats.Running || stats.Usage.CPU.Known || stats.Usage.Memory.Known || stats.Usage.At.IsZero() {
		t.Errorf("%+v, %v", stats, err)
	}
	if detail, err := m.ContainerDetail(c.id); err != nil || detail != nil {
		t.Errorf("%+v, %v", detail, err)
	}
	if err := run.meter.Close(); err != nil {
		t.Error(err)
	}
}
