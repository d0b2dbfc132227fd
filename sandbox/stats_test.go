package sandbox

import (
	"log/slog"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/index"
	"berth/sandbox/handler"
	"berth/sandbox/meter"
	"berth/sandbox/view"
	"berth/shim/ociruntime"
)

func statsManager() *Manager {
	return &Manager{cfg: Config{Host: &host.Facts{}}, containers: index.New[*container]("container"), pods: index.New[*pod]("pod")}
}

// The cgroup of a container in a sandbox of its runtime's is there, and empty.
func TestSandboxedContainerHasNoFigures(t *testing.T) {
	m := statsManager()
	p := &pod{id: "p", config: &runtimeapi.PodSandboxConfig{}}
	p.rec.Runtime = &handler.Runtime{Runtime: ociruntime.Runtime{Sandboxed: true}}
	m.pods.Put(p.id, p)
	c := &container{id: "c", podID: "p"}
	c.rec.CgroupsPath = "/"
	run := &running{meter: m.containerMeter(c)}
	c.running.Store(run)
	m.containers.Put(c.id, c)
	stats, err := m.ContainerStats(&view.Container{ID: c.id})
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

// One container that can't be measured does not hide its pod.
func TestPodStatsLeaveOutWhatCantBeMeasured(t *testing.T) {
	m := statsManager()
	m.log = slog.New(slog.DiscardHandler)
	m.pods.Put("p", &pod{id: "p", config: &runtimeapi.PodSandboxConfig{}})
	var infos []*view.Container
	for _, id := range []string{"broken", "good"} {
		c := &container{id: id, podID: "p"}
		run := &running{meter: &meter.Container{}}
		if id == "broken" {
			run.meter = m.cgroups().Container("not a path of cgroups", false)
		}
		c.running.Store(run)
		m.containers.Put(id, c)
		infos = append(infos, &view.Container{ID: id, State: runtimeapi.ContainerState_CONTAINER_RUNNING})
	}
	stats, err := m.PodStats(&view.Pod{ID: "p"}, infos)
	if err != nil || len(stats.Containers) != 1 || stats.Containers[0].Info.ID != "good" {
		t.Errorf("%+v, %v", stats, err)
	}
}
