package meter

import (
	"errors"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"berth/cni"
	"berth/internal/cgstats"
)

// The pause of a runtime with a sandbox of its own is a process in the node's
// network, which is not the pod's.
func TestNetworkIsThatOfThePinnedNamespace(t *testing.T) {
	if os.Geteuid() != 0 || os.Getenv("BERTH_MACHINE") == "" {
		t.Skip("needs contrib/machine to make a network namespace")
	}
	netns := t.TempDir() + "/ns"
	if err := cni.NewNetNS(netns); err != nil {
		t.Fatal(err)
	}
	if err := cni.InNetNS(netns, func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "net1"}, PeerName: defaultInterface})
	}); err != nil {
		t.Fatal(err)
	}
	pod := Cgroups{}.Pod("/p", true, netns)
	found, err := pod.net.Read()
	if names := interfaceNames(defaultFirst(found)); err != nil || len(names) != 2 || names[0] != defaultInterface || names[1] != "net1" {
		t.Errorf("interfaces %v, %v", names, err)
	}
	if err := errors.Join(pod.Close(), cni.RemoveNetNS(netns)); err != nil {
		t.Fatal(err)
	}
	stopped := Cgroups{}.Pod("/p", true, netns)
	if _, err := stopped.net.Read(); !errors.Is(err, cgstats.ErrGone) {
		t.Errorf("without the namespace: %v", err)
	}
	if err := stopped.Close(); err != nil {
		t.Error(err)
	}
}
