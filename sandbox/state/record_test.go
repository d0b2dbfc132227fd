package state

import (
	"encoding/json"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func encode(t *testing.T, m proto.Message) []byte {
	t.Helper()
	data, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func body(t *testing.T, rec any) []byte {
	t.Helper()
	data, err := json.Marshal(rec)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func shares(n int64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{CpuShares: n}
}

func TestReadPod(t *testing.T) {
	config := encode(t, &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web"}})
	rec, read, update, err := ReadPod("p", body(t, PodRecord{ID: "p", Config: config, Phase: PodReady}))
	if err != nil || rec.Phase != PodReady || read.Metadata.Name != "web" || update != nil {
		t.Errorf("%+v, %v, %v, %v", rec, read, update, err)
	}
	resources := encode(t, &runtimeapi.UpdatePodSandboxResourcesRequest{Resources: shares(5)})
	if _, _, update, err = ReadPod("p", body(t, PodRecord{ID: "p", Config: config, Resources: resources})); err != nil || update.GetResources().GetCpuShares() != 5 {
		t.Errorf("updated: %v, %v", update, err)
	}
	for name, damaged := range map[string][]byte{
		"another pod's": body(t, PodRecord{ID: "q", Config: config}), "no metadata": body(t, PodRecord{ID: "p"}), "no JSON": []byte("{"),
		"no config": body(t, PodRecord{ID: "p", Config: []byte{0xff}}), "no resources": body(t, PodRecord{ID: "p", Config: config, Resources: []byte{0xff}}),
	} {
		if _, _, _, err := ReadPod("p", damaged); err == nil {
			t.Errorf("%s: it is trusted", name)
		}
	}
}

func TestReadContainer(t *testing.T) {
	config := encode(t, &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, Linux: &runtimeapi.LinuxContainerConfig{Resources: shares(2)}})
	rec, read, resources, err := ReadContainer("c", body(t, ContainerRecord{ID: "c", PodID: "p", Config: config}))
	if err != nil || rec.PodID != "p" || read.Metadata.Name != "main" || resources.GetCpuShares() != 2 {
		t.Errorf("%+v, %v, %v, %v", rec, read, resources, err)
	}
	if _, _, resources, err = ReadContainer("c", body(t, ContainerRecord{ID: "c", Config: config, Resources: encode(t, shares(5))})); err != nil || resources.GetCpuShares() != 5 {
		t.Errorf("updated: %v, %v", resources, err)
	}
	for name, damaged := range map[string][]byte{
		"another container's": body(t, ContainerRecord{ID: "d", Config: config}), "no metadata": body(t, ContainerRecord{ID: "c"}), "no JSON": []byte("{"),
		"no config": body(t, ContainerRecord{ID: "c", Config: []byte{0xff}}), "no resources": body(t, ContainerRecord{ID: "c", Config: config, Resources: []byte{0xff}}),
	} {
		if _, _, _, err := ReadContainer("c", damaged); err == nil {
			t.Errorf("%s: it is trusted", name)
		}
	}
}

// Each volume holds its layers under a name of its own.
func TestHolders(t *testing.T) {
	holders := map[string]bool{"c": true} // the container itself
	for _, v := range []Volume{{Mount: 0}, {Mount: 1}, {Mount: 11}} {
		for _, id := range []string{"c", "d"} {
			if holders[v.Holder(id)] {
				t.Errorf("%s holds twice", v.Holder(id))
			}
			holders[v.Holder(id)] = true
		}
	}
}
