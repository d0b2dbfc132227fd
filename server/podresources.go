package server

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PodResources is the part of the sandbox manager that changes pods' resources. Package sandbox
// documents the contract.
type PodResources interface {
	UpdatePodSandboxResources(ctx context.Context, id string,
		overhead, resources *runtimeapi.LinuxContainerResources) error
}

// UpdatePodSandboxResources implements RuntimeService.
func (s *runtimeService) UpdatePodSandboxResources(ctx context.Context,
	req *runtimeapi.UpdatePodSandboxResourcesRequest) (*runtimeapi.UpdatePodSandboxResourcesResponse, error) {
	if err := need(field{"pod_sandbox_id", req.GetPodSandboxId() != ""}); err != nil {
		return nil, err
	}
	err := s.pods.UpdatePodSandboxResources(ctx, req.GetPodSandboxId(), req.GetOverhead(), req.GetResources())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.UpdatePodSandboxResourcesResponse{}, nil
}
