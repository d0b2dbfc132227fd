package state

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/testutil"
)

// Inspect reads the records that the manager writes.
func TestInspect(t *testing.T) {
	dirs := Dirs{Root: t.TempDir(), State: "/state", NetNSs: "/run/netns"}
	records, err := OpenRecords(dirs.Root, noWait)
	testutil.Must(t, err)
	encode := func(m proto.Message) []byte {
		data, err := proto.Marshal(m)
		testutil.Must(t, err)
		return data
	}
	users := &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD,
		Uids: []*runtimeapi.IDMapping{{HostId: 65536, Length: 65536}}, Gids: []*runtimeapi.IDMapping{{HostId: 65536, Length: 65536}}}
	config := encode(&runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "pod"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{UsernsOptions: users}}}})
	pods := map[Phase]Stage{PodStarting: BeingMade, PodReady: Running, "stopped": Ended, Removing: BeingRemoved}
	for phase := range pods {
		rec := podRecord{
			PodSpec: &PodSpec{ID: string(phase), BootID: "boot", CreatedAt: time.Now(), CgroupsPath: "/c/" + string(phase),
				Tmpfs: phase != "stopped", NetNS: dirs.NetNS("x")},
			PodStatus: &PodStatus{Network: &cni.Attachment{Network: "net"}, IPs: []string{"10.0.0.2"}, PausePID: 5, PauseStart: 6},
			Phase:     phase, Config: config}
		testutil.Must(t, records.pods.Write(rec.ID, rec))
	}
	containers := map[Phase]Stage{ContainerCreated: BeingMade, ContainerStarting: BeingMade, ContainerExited: BeingMade, Removing: BeingRemoved}
	for phase := range containers { // without a process they were never published
		rec := containerRecord{ContainerSpec: &ContainerSpec{ID: string(phase), PodID: "p"}, Phase: phase, Config: encode(&runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "c"}})}
		testutil.Must(t, records.containers.Write(rec.ID, rec))
	}
	testutil.Must(t, records.pods.Write("other", podRecord{PodSpec: &PodSpec{ID: "another"}, Phase: PodReady, Config: config}))
	got, err := Inspect(dirs.Root, dirs.State)
	testutil.Must(t, err)
	for phase, stage := range pods {
		p := got.Pods[string(phase)]
		tmpfs, etc := dirs.Tmpfs(string(phase)), dirs.Etc(string(phase))
		if phase == PodStopped { // a phase of an earlier version
			tmpfs, etc = dirs.OldShm(string(phase)), dirs.PodFiles(string(phase))
		}
		if p == nil || p.Stage != stage || p.BootID != "boot" || p.NetNS != "/run/netns/berth-x" || p.Network.Network != "net" || p.IPs[0] != "10.0.0.2" ||
			p.PausePID != 5 || p.PauseStart != 6 || p.Tmpfs != tmpfs || p.Etc != etc || p.UserNS != dirs.UserNS(p.ID) || p.CgroupsPath != "/c/"+p.ID {
			t.Errorf("pod in phase %s: %+v", phase, p)
		}
	}
	for phase, stage := range containers {
		if c := got.Containers[string(phase)]; c == nil || c.Stage != stage || c.PodID != "p" {
			t.Errorf("container in phase %s: %+v", phase, c)
		}
	}
	if len(got.Surveys) != 3 || len(got.Surveys[0].Damaged) != 1 || got.Surveys[0].Damaged[0].Name != "other" {
		t.Errorf("surveys: %+v", got.Surveys)
	}
}
