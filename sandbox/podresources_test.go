package sandbox

import (
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/index"
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
	dir, err := state.OpenPods(root)
	if err != nil {
		t.Fatal(err)
	}
	m = &Manager{cfg: Config{Host: &host.Facts{}}, plugins: plugins.Caller{Plugins: plugins.None{}}, podRecords: dir,
		pods: index.New[*pod]("pod sandbox"), containers: index.New[*container]("container"),
		appArmor: lsm.NewAppArmor(false, nil, nil), tasks: task.NewRunner(slog.New(slog.DiscardHandler), nil)}
	m.Lists, m.events = state.NewLists(m.pods, m.containers)
	p = &pod{id: "p", config: &runtimeapi.PodSandboxConfig{}, turn: task.NewTurn()}
	p.rec = state.PodRecord{ID: p.id, Phase: state.PodReady, CgroupsPath: "/kubepods/p", NetNS: "/run/netns/p"}
	p.info.Store(p.snapshot())
	m.pods.Put(p.id, p)
	return m, p, records
}

func shares(n int64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{CpuShares: n}
}

// What readers take from the record without the pod's turn is not written by an update: the race
// detector is the judge.
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
			info := p.info.Load()
			if got := p.described().NetNS + p.forPlugins(info).CgroupsPath; got != "/run/netns/p/kubepods/p" {
				t.Errorf("read %q", got)
			}
			if p.runtime() != nil || info.Config == nil {
				t.Error("another pod")
			}
		}
	})
	for n := range int64(50) {
		if err := m.UpdatePodSandboxResources(t.Context(), p.id, nil, shares(n+2)); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	readers.Wait()
	if got := p.info.Load().Config.Linux.Resources.CpuShares; got != 51 {
		t.Errorf("the pod shows %d shares", got)
	}
}

// An update that can't be recorded did not happen: the next record that is written must not have it.
func TestPodUpdateThatIsNotRecorded(t *testing.T) {
	m, p, records := aReadyPod(t)
	if err := m.UpdatePodSandboxResources(t.Context(), p.id, nil, shares(100)); err != nil {
		t.Fatal(err)
	}
	recorded := string(p.rec.Resources)
	if err := os.RemoveAll(records); err != nil {
		t.Fatal(err)
	}
	if err := m.UpdatePodSandboxResources(t.Context(), p.id, nil, shares(200)); err == nil {
		t.Fatal("an update without a place for records succeeded")
	}
	if string(p.rec.Resources) != recorded || p.info.Load().Config.Linux.Resources.CpuShares != 100 {
		t.Errorf("the failed update stays: %q, shown %v", p.rec.Resources, p.info.Load().Config.Linux.Resources)
	}
}
