package sandbox

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/handler"
	"berth/sandbox/state"
	"berth/shim/ociruntime"
)

// The cgroup of a container of a sandboxing runtime exists, but has no processes.
func TestSandboxedContainerHasNoUsage(t *testing.T) {
	m := newManager(Config{}, &parts{}, task.NewRunner(nil, nil))
	p := &pod{PodSpec: &state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{}, Runtime: &handler.Runtime{Runtime: ociruntime.Runtime{Sandboxed: true}}}}
	m.objects.pods.Put(p.ID, p)
	c := &container{ContainerSpec: &state.ContainerSpec{ID: "c", PodID: "p", CgroupsPath: "/"}}
	run := &running{meter: m.meters.openContainer(c)}
	c.running.Store(run)
	m.objects.containers.Put(c.ID, c)
	stats, err := m.ContainerStats(&state.Container{ContainerSpec: c.ContainerSpec})
	if err != nil || !stats.Running || stats.Usage.CPU.Known || stats.Usage.Memory.Known || stats.Usage.At.IsZero() {
		t.Errorf("%+v, %v", stats, err)
	}
	if detail, err := m.ContainerDetail(c.ID); err != nil || detail != nil {
		t.Errorf("%+v, %v", detail, err)
	}
	testutil.Must(t, run.meter.Close())
}
