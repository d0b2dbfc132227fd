package podrun

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client/fakecri"
	"berth/cmd/berth/podyaml"
)

func TestOverlaps(t *testing.T) {
	taken := []*runtimeapi.IDMapping{{HostId: firstHostID + 3*podyaml.UserNamespaceIDs, Length: podyaml.UserNamespaceIDs}, {HostId: firstHostID - 1, Length: 2}}
	for first, want := range map[uint32]bool{
		firstHostID:                                true, // overlaps by one ID
		firstHostID + podyaml.UserNamespaceIDs:     false,
		firstHostID + 2*podyaml.UserNamespaceIDs:   false,
		firstHostID + 3*podyaml.UserNamespaceIDs:   true,
		firstHostID + 4*podyaml.UserNamespaceIDs:   false,
		firstHostID + 7*podyaml.UserNamespaceIDs/2: true,
	} {
		if got := overlaps(taken, first); got != want {
			t.Errorf("from %d: %v, want %v", first, got, want)
		}
	}
	if last := uint64(firstHostID) + hostRanges*podyaml.UserNamespaceIDs; last != 0x7ffe0000 {
		t.Errorf("the ranges end at %#x", last)
	}
}

func TestEachPodGetsItsOwnIDRange(t *testing.T) {
	b := newBench(t, &fakecri.Server{})
	b.config.Detach = true
	for _, spec := range []string{"hostUsers: false", "hostUsers: false", "hostUsers: true"} {
		if _, err := b.run(t.Context(), t.Context(), spec+"\nhostNetwork: true\nrestartPolicy: Never\ncontainers: ["+container("app")+"]"); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[uint32]bool{}
	for _, config := range b.PodConfigs() {
		options := config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
		for _, m := range options.GetUids() {
			if m.HostId < firstHostID || m.HostId%podyaml.UserNamespaceIDs != 0 || seen[m.HostId] {
				t.Errorf("the range begins at %#x, others at %v", m.HostId, seen)
			}
			seen[m.HostId] = true
		}
	}
	if len(seen) != 2 {
		t.Errorf("%d pods have a user namespace, want 2", len(seen))
	}
}
