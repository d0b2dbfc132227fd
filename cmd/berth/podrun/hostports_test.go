package podrun

import (
	"errors"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/client/fakecri"
)

func TestExplainPortsNamesOwner(t *testing.T) {
	t.Parallel()
	c, err := client.Dial(t.Context(), fakecri.Start(t, &fakecri.Server{}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "p1", Namespace: "default"}}}); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		"add: tcp port 18000 on * belongs to the pod with address 10.0.0.2, tcp port 18000 on * belongs to the pod with address fd00::2": "host port 18000/tcp is used by pod default/p1",
		"UDP port 53 on 127.0.0.1 belongs to the pod with address 10.9.9.9; more":                                                        "host port 53/udp is used by the pod with address 10.9.9.9",
		"no space left on device": "no space left on device",
	} {
		if got := explainPorts(t.Context(), c, errors.New(text)); got.Error() != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
