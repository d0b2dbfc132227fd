package sandbox

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
	"berth/sandbox/state"
)

// managerWithPod returns a manager with real records and one ready pod.
func managerWithPod(t *testing.T) (m *Manager, p *pod, records string) {
	t.Helper()
	m, root := managerWithRecords(t)
	p = newPod(&state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{}, CgroupsPath: "/kubepods/p", NetNS: "/run/netns/p"}, state.NewPodStatus(state.PodReady), nil)
	p.info.Store(p.unshared().snapshot())
	m.objects.pods.Put(p.ID, p)
	return m, p, filepath.Join(root, "pods")
}

func shares(n int64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{CpuShares: n}
}

// An update replaces the snapshot, so readers need no lock. The race detector checks that.
func TestPodUpdateReplacesSnapshot(t *testing.T) {
	m, p, _ := managerWithPod(t)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	readers.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if info := p.info.Load(); info.ShownConfig() == nil || pluginPod(info).CgroupsPath != "/kubepods/p" {
				t.Errorf("read %+v", info)
			}
		}
	})
	for n := range int64(50) {
		testutil.Must(t, m.UpdatePodSandboxResources(t.Context(), p.ID, nil, shares(n+2)))
	}
	close(stop)
	readers.Wait()
	if got := p.info.Load().ShownConfig().Linux.Resources.CpuShares; got != 51 {
		t.Errorf("the pod shows %d shares", got)
	}
}

// The next record must not contain an update that could not be recorded.
func TestUnrecordedPodUpdateIsReverted(t *testing.T) {
	m, p, records := managerWithPod(t)
	testutil.Must(t, m.UpdatePodSandboxResources(t.Context(), p.ID, nil, shares(100)))
	recorded := p.unshared().Resources
	testutil.Must(t, os.RemoveAll(records))
	if err := m.UpdatePodSandboxResources(t.Context(), p.ID, nil, shares(200)); err == nil {
		t.Fatal("an update without a record succeeded")
	}
	if p.unshared().Resources != recorded || p.info.Load().ShownConfig().Linux.Resources.CpuShares != 100 {
		t.Errorf("resources after a failed update: %q, shown %v", p.unshared().Resources, p.info.Load().ShownConfig().Linux.Resources)
	}
}
