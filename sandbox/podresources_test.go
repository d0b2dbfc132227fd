package sandbox

import (
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/task"
	"berth/sandbox/lsm"
	"berth/sandbox/plugins"
	"berth/sandbox/state"
)

// aReadyPod is a pod of a manager that has just enough for updates of its resources.
func aReadyPod(t *testing.T) (m *Manager, p *pod, records string) {
	t.Helper()
	root := t.TempDir()
	records = filepath.Join(root, "pods")
	dir, err := state.OpenRecords(root, func(string, string) func() { return func() {} })
	if err != nil {
		t.Fatal(err)
	}
	m = &Manager{plugins: plugins.Caller{Plugins: plugins.None{}}, records: dir,
		objects:  newObjects(),
		appArmor: lsm.NewAppArmor(false, nil, nil), tasks: task.NewRunner(slog.New(slog.DiscardHandler), nil)}
	m.Lists, m.events = state.NewLists(m.pods, m.containers)
	p = newPod(&state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{}, CgroupsPath: "/kubepods/p", NetNS: "/run/netns/p"}, state.NewPodStatus(state.PodReady), nil)
	p.info.Store(p.unshared().snapshot())
	m.pods.Put(p.ID, p)
	return m, p, records
}

func shares(n int64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{CpuShares: n}
}

// An update replaces the snapshot, so readers never wait for it. The race detector is the judge.
func TestPodUpdateLeavesReadersAlone(t *testing.T) {
	m, p, _ := aReadyPod(t)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if info := p.info.Load(); info.ShownConfig() == nil || p.forPlugins(info).CgroupsPath != "/kubepods/p" {
				t.Errorf("read %+v", info)
			}
		}
	})
	for n := range int64(50) {
		if err := m.UpdatePodSandboxResources(t.Context(), p.ID, nil, shares(n+2)); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	readers.Wait()
	if got := p.info.Load().ShownConfig().Linux.Resources.CpuShares; got != 51 {
		t.Errorf("the pod shows %d shares", got)
	}
}

// An update that can't be recorded did not happen: the next record that is written must not have
// it.
func TestPodUpdateThatIsNotRecorded(t *testing.T) {
	m, p, records := aReadyPod(t)
	if err := m.UpdatePodSandboxResources(t.Context(), p.ID, nil, shares(100)); err != nil {
		t.Fatal(err)
	}
	recorded := p.unshared().Resources
	if err := os.RemoveAll(records); err != nil {
		t.Fatal(err)
	}
	if err := m.UpdatePodSandboxResources(t.Context(), p.ID, nil, shares(200)); err == nil {
		t.Fatal("an update without a place for records succeeded")
	}
	if p.unshared().Resources != recorded || p.info.Load().ShownConfig().Linux.Resources.CpuShares != 100 {
		t.Errorf("the failed update stays: %q, shown %v", p.unshared().Resources, p.info.Load().ShownConfig().Linux.Resources)
	}
}
