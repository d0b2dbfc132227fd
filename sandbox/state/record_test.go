package state

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/nri"
	"berth/internal/testutil"
	"berth/internal/userns"
	"berth/oci/confine"
	"berth/sandbox/handler"
	shimproto "berth/shim/proto"
)

func encode(t *testing.T, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	testutil.Must(t, err)
	return data
}

func body(t *testing.T, rec any) []byte {
	t.Helper()
	data, err := json.Marshal(rec)
	testutil.Must(t, err)
	return data
}

func shares(n int64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{CpuShares: n}
}

func TestDecodePod(t *testing.T) {
	t.Parallel()
	config := encode(t, &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web"}})
	spec, status, err := decodePod("p", body(t, podRecord{PodSpec: &PodSpec{ID: "p"}, Config: config, Phase: "ready"}))
	if err != nil || status.Phase() != PodReady || spec.Config.Metadata.Name != "web" || status.Resources != nil {
		t.Errorf("%+v, %+v, %v", spec, status, err)
	}
	resources := encode(t, &runtimeapi.UpdatePodSandboxResourcesRequest{Resources: shares(5)})
	if _, status, err = decodePod("p", body(t, podRecord{PodSpec: &PodSpec{ID: "p"}, Config: config, Resources: resources})); err != nil || status.Resources.GetResources().GetCpuShares() != 5 {
		t.Errorf("after an update: %v, %v", status.Resources, err)
	}
	for name, damaged := range map[string][]byte{
		"another pod's": body(t, podRecord{PodSpec: &PodSpec{ID: "q"}, Config: config}), "no metadata": body(t, podRecord{PodSpec: &PodSpec{ID: "p"}}), "no JSON": []byte("{"),
		"no config": body(t, podRecord{PodSpec: &PodSpec{ID: "p"}, Config: []byte{0xff}}), "no resources": body(t, podRecord{PodSpec: &PodSpec{ID: "p"}, Config: config, Resources: []byte{0xff}}),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := decodePod("p", damaged); err == nil {
				t.Error("a damaged record was decoded")
			}
		})
	}
}

func TestDecodeContainer(t *testing.T) {
	t.Parallel()
	config := encode(t, &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, Linux: &runtimeapi.LinuxContainerConfig{Resources: shares(2)}})
	spec, status, err := decodeContainer("c", body(t, containerRecord{ContainerSpec: &ContainerSpec{ID: "c", PodID: "p"}, Config: config}))
	if err != nil || spec.PodID != "p" || spec.Config.Metadata.Name != "main" || status.Resources.GetCpuShares() != 2 {
		t.Errorf("%+v, %+v, %v", spec, status, err)
	}
	if _, status, err = decodeContainer("c", body(t, containerRecord{ContainerSpec: &ContainerSpec{ID: "c"}, Config: config, Resources: encode(t, shares(5))})); err != nil || status.Resources.GetCpuShares() != 5 {
		t.Errorf("after an update: %v, %v", status.Resources, err)
	}
	for name, damaged := range map[string][]byte{
		"another container's": body(t, containerRecord{ContainerSpec: &ContainerSpec{ID: "d"}, Config: config}), "no metadata": body(t, containerRecord{ContainerSpec: &ContainerSpec{ID: "c"}}), "no JSON": []byte("{"),
		"no config": body(t, containerRecord{ContainerSpec: &ContainerSpec{ID: "c"}, Config: []byte{0xff}}), "no resources": body(t, containerRecord{ContainerSpec: &ContainerSpec{ID: "c"}, Config: config, Resources: []byte{0xff}}),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := decodeContainer("c", damaged); err == nil {
				t.Error("a damaged record was decoded")
			}
		})
	}
}

// Records keep every recorded field. Phases unknown to earlier versions are restored as the nearest
// recorded phase.
func TestRecordsRoundTrip(t *testing.T) {
	t.Parallel()
	for phase, want := range map[Phase]Phase{PodStarting: PodStarting, PodReady: PodReady, PodNotReady: PodReady, PodStopping: PodStopping, PodStopped: PodStopping, Removing: Removing} {
		t.Run("pod "+string(phase), func(t *testing.T) {
			spec := &PodSpec{ID: "p", CgroupsPath: "/c", NetNS: "/n", Pause: shimproto.PlainPause, Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web"}},
				Mappings: &userns.Mappings{UIDs: []specs.LinuxIDMapping{{HostID: 65536, Size: 65536}}}}
			status := PodStatus{phase: phase, IPs: []string{"10.0.0.2"}, PausePID: 7, PauseStart: 8}
			rec, err := encodePod(spec, &status)
			testutil.Must(t, err)
			gotSpec, got, err := decodePod("p", body(t, rec))
			if err != nil || got.Phase() != want || got.PausePID != 7 || got.PauseStart != 8 || got.IPs[0] != "10.0.0.2" ||
				gotSpec.CgroupsPath != "/c" || gotSpec.NetNS != "/n" || gotSpec.Pause != shimproto.PlainPause || gotSpec.Mappings.UIDs[0].HostID != 65536 {
				t.Errorf("%+v, %+v, %v", gotSpec, got, err)
			}
		})
	}
	created := &specs.Process{}
	for phase, want := range map[Phase]Phase{ContainerCreating: ContainerCreating, ContainerCreated: ContainerCreated, ContainerStarting: ContainerStarting,
		ContainerRunning: ContainerRunning, ContainerExited: ContainerExited, Removing: Removing} {
		t.Run("container "+string(phase), func(t *testing.T) {
			status := ContainerStatus{phase: phase, Process: created}
			if phase == ContainerCreating {
				status.Process = nil
			}
			rec, err := encodeContainer(&ContainerSpec{ID: "c", Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "main"}}}, &status)
			testutil.Must(t, err)
			if _, got, err := decodeContainer("c", body(t, rec)); err != nil || got.Phase() != want {
				t.Errorf("%q, %v", got.Phase(), err)
			}
		})
	}
}

// Other versions of berth read these names.
func TestRecordFieldNames(t *testing.T) {
	t.Parallel()
	ids := []specs.LinuxIDMapping{{Size: 1}}
	now := time.Unix(1, 0)
	labels := confine.Labels{Process: "p", Mount: "m"}
	for name, test := range map[string]struct {
		rec  any
		want string
	}{
		"pod": {&podRecord{
			PodSpec: &PodSpec{ID: "p", BootID: "b", CreatedAt: now, Handler: "h", Runtime: &handler.Runtime{}, Tmpfs: true, CgroupsPath: "/c",
				NetNS: "/n", IPRanges: [][]cni.IPRange{{}}, Mappings: &userns.Mappings{UIDs: ids}, Labels: labels, Pause: shimproto.PlainPause, PauseImage: &Image{}},
			PodStatus: &PodStatus{phase: PodReady, RunID: "r", Network: &cni.Attachment{}, IPs: []string{"1"}, PausePID: 1, PauseStart: 1, Presented: true, TakenDown: true},
			Phase:     PodReady, Config: []byte{1}, Resources: []byte{1},
		}, "bootID cgroupsPath config createdAt handler id ipRanges ips mappings netns network pause pauseImage pausePID pauseStart phase resources runID runtime selinux tmpfs"},
		"container": {&containerRecord{
			ContainerSpec: &ContainerSpec{ID: "c", PodID: "p", BootID: "b", CreatedAt: now, Image: Image{ID: "i"}, Volumes: []Volume{{}}, Project: 1,
				CgroupsPath: "/c", LogPath: "/l", Labels: labels},
			ContainerStatus: &ContainerStatus{phase: ContainerExited, RunID: "r", Limits: &nri.Limits{}, Adjustment: &nri.Adjustment{}, Process: &specs.Process{},
				Described: &specs.Spec{}, StartedAt: now, Exit: &Exit{}, PID: 1, Presented: true},
			Phase: ContainerExited, Config: []byte{1}, Resources: []byte{1},
		}, "adjustment bootID cgroupsPath config createdAt described exit id image limits logPath phase podID process project resources runID selinux startedAt user volumes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fields := map[string]json.RawMessage{}
			testutil.Must(t, json.Unmarshal(body(t, test.rec), &fields))
			if got := strings.Join(slices.Sorted(maps.Keys(fields)), " "); got != test.want {
				t.Errorf("fields\n%s, want\n%s", got, test.want)
			}
		})
	}
}

// The first write of a record encodes the object's config. The config of a loaded object is already
// encoded.
func TestConfigIsEncodedOnce(t *testing.T) {
	t.Parallel()
	pod := &PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web"}}}
	ctr := &ContainerSpec{ID: "c", Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "main"}}}
	first, err := encodePod(pod, &PodStatus{phase: PodStarting})
	testutil.Must(t, err)
	loaded, _, err := decodePod("p", body(t, first))
	if err != nil || !bytes.Equal(loaded.encoded, first.Config) {
		t.Errorf("loaded: %q, %v", loaded.encoded, err)
	}
	if again, err := encodePod(pod, &PodStatus{phase: PodReady}); err != nil || &again.Config[0] != &first.Config[0] {
		t.Errorf("the pod's config is encoded again, %v", err)
	}
	created, err := encodeContainer(ctr, &ContainerStatus{phase: ContainerCreated})
	testutil.Must(t, err)
	if again, err := encodeContainer(ctr, &ContainerStatus{phase: ContainerExited}); err != nil || &again.Config[0] != &created.Config[0] {
		t.Errorf("the container's config is encoded again, %v", err)
	}
}

// A record of an earlier version has no mappings. decodePod derives them from the config.
func TestMappingsOfEarlierVersionAreDerived(t *testing.T) {
	t.Parallel()
	ids := []*runtimeapi.IDMapping{{HostId: 65536, Length: 65536}}
	config := encode(t, &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{
			UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: ids, Gids: ids}}}}})
	spec, _, err := decodePod("p", body(t, podRecord{PodSpec: &PodSpec{ID: "p"}, Config: config, Phase: "ready"}))
	if err != nil || spec.Mappings == nil || spec.Mappings.HostUID(0) != 65536 {
		t.Errorf("%+v, %v", spec, err)
	}
}

// Each volume has a different holder.
func TestHoldersAreUnique(t *testing.T) {
	holders := map[string]bool{"c": true} // the container itself
	for _, v := range []Volume{{Mount: 0}, {Mount: 1}, {Mount: 11}} {
		for _, id := range []string{"c", "d"} {
			if holders[v.Holder(id)] {
				t.Errorf("holder %s is used twice", v.Holder(id))
			}
			holders[v.Holder(id)] = true
		}
	}
}
