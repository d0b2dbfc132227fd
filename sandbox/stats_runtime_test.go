package sandbox

import (
	"errors"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/cgstats"
	"berth/internal/host"
	"berth/shim/ociruntime"
)

func statsManager() *Manager {
	return &Manager{cfg: Config{Host: &host.Facts{}}, containers: newIndex[*container]("container"), pods: newIndex[*pod]("pod")}
}

// The pause of a runtime with a sandbox of its own is a process in the node's
// network, which is not the pod's.
func TestNetworkIsThatOfThePinnedNamespace(t *testing.T) {
	if os.Geteuid() != 0 || os.Getenv("BERTH_MACHINE") == "" {
		t.Skip("needs contrib/machine to make a network namespace")
	}
	p := &pod{id: "p", config: &runtimeapi.PodSandboxConfig{}}
	p.rec.PausePID, p.rec.NetNS = os.Getpid(), t.TempDir()+"/ns"
	if err := cni.NewNetNS(p.rec.NetNS); err != nil {
		t.Fatal(err)
	}
	if err := cni.InNetNS(p.rec.NetNS, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "net1"}, PeerName: defaultInterface})
	}); err != nil {
		t.Fatal(err)
	}
	m := statsManager()
	meter := m.newPodMeter(p)
	found, err := meter.net.Read()
	if names := interfaceNames(defaultFirst(found)); err != nil || len(names) != 2 || names[0] != defaultInterface || names[1] != "net1" {
		t.Errorf("interfaces %v, %v", names, err)
	}
	if err := errors.Join(meter.Close(), cni.RemoveNetNS(p.rec.NetNS)); err != nil {
		t.Fatal(err)
	}
	stopped := m.newPodMeter(p)
	if _, err := stopped.net.Read(); !errors.Is(err, cgstats.ErrGone) {
		t.Errorf("without the namespace: %v", err)
	}
	if err := stopped.Close(); err != nil {
		t.Error(err)
	}
}

// The cgroup of a container in a sandbox of its runtime's is there, and empty.
func TestSandboxedContainerHasNoFigures(t *testing.T) {
	m := statsManager()
	p := &pod{id: "p", config: &runtimeapi.PodSandboxConfig{}}
	p.rec.Runtime = &podRuntime{Runtime: ociruntime.Runtime{Sandboxed: true}}
	m.pods.put(p.id, p)
	c := &container{id: "c", podID: "p"}
	c.rec.CgroupsPath = "/"
	run := &running{meter: m.containerMeter(c)}
	c.running.Store(run)
	m.containers.put(c.id, c)
	stats, err := m.ContainerStats(&ContainerInfo{ID: c.id})
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
