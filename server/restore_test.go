package server

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func TestRestorePod(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	req := func() *runtimeapi.RestorePodRequest {
		return &runtimeapi.RestorePodRequest{CheckpointPath: "/c", Config: podConfig("a", nil), RuntimeHandler: "h",
			ContainerConfigs: []*runtimeapi.ContainerConfig{containerConfig("x", "busybox"), containerConfig("y", "busybox")}}
	}
	resp, err := h.runtime.RestorePod(t.Context(), req())
	testutil.Must(t, err)
	got := resp.GetRestoredContainers()
	if resp.PodSandboxId != "p1" || len(got) != 2 || got[0].Name != "x" || got[0].ContainerId != "c0" || got[1].Name != "y" {
		t.Errorf("response %v", resp)
	}
	if want := "RestorePod /c h2"; !slices.Contains(pods.called(), want) {
		t.Errorf("calls %q, want %q", pods.called(), want)
	}
	for name, change := range map[string]func(*runtimeapi.RestorePodRequest){
		"no path":       func(r *runtimeapi.RestorePodRequest) { r.CheckpointPath = "" },
		"no config":     func(r *runtimeapi.RestorePodRequest) { r.Config = nil },
		"no metadata":   func(r *runtimeapi.RestorePodRequest) { r.Config.Metadata = nil },
		"no containers": func(r *runtimeapi.RestorePodRequest) { r.ContainerConfigs = nil },
		"options":       func(r *runtimeapi.RestorePodRequest) { r.Options = map[string]string{"unknown": "1"} },
	} {
		t.Run(name, func(t *testing.T) {
			r := req()
			change(r)
			if _, err := h.runtime.RestorePod(t.Context(), r); status.Code(err) != codes.InvalidArgument {
				t.Errorf("RestorePod: %v", err)
			}
		})
	}
}
