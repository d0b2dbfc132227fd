package server

import (
	"context"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func (f *fakePods) UpdatePodSandboxResources(ctx context.Context, id string, overhead, resources *runtimeapi.LinuxContainerResources) error {
	return f.call(ctx, "UpdatePodSandboxResources", id, " ", overhead.GetCpuShares(), resources.GetMemoryLimitInBytes())
}

func TestUpdatePodSandboxResources(t *testing.T) {
	pods := &fakePods{}
	h := start(t, testConfig, pods, &fakeImages{})
	_, err := h.runtime.UpdatePodSandboxResources(t.Context(), &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: "p1",
		Overhead: &runtimeapi.LinuxContainerResources{CpuShares: 2}, Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 99}})
	testutil.Must(t, err)
	if want := []string{"UpdatePodSandboxResourcesp1 2 99"}; !slices.Equal(pods.called(), want) {
		t.Errorf("calls %q, want %q", pods.called(), want)
	}
	if _, err := h.runtime.UpdatePodSandboxResources(t.Context(), &runtimeapi.UpdatePodSandboxResourcesRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("without an ID: %v", err)
	}
}
