package server

import (
	"context"
	"math"
	"path/filepath"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// Checkpoints is the part of the sandboxes that checkpoints them. Package sandbox documents the
// contracts.
type Checkpoints interface {
	CheckpointContainer(ctx context.Context, id, location string, timeout time.Duration) error
	CheckpointPod(ctx context.Context, podID, output string, ids []string, options map[string]string) error
}

// CheckpointContainer implements RuntimeService.
func (s *runtimeService) CheckpointContainer(ctx context.Context,
	req *runtimeapi.CheckpointContainerRequest) (*runtimeapi.CheckpointContainerResponse, error) {
	if err := need(
		field{"container_id", req.GetContainerId() != ""},
		field{"location", req.GetLocation() != ""},
	); err != nil {
		return nil, err
	}
	if req.GetTimeout() < 0 {
		return nil, errdefs.InvalidArgument("timeout is negative")
	}
	timeout := time.Duration(min(req.GetTimeout(), math.MaxInt64/int64(time.Second))) * time.Second
	if err := s.pods.CheckpointContainer(ctx, req.GetContainerId(), req.GetLocation(), timeout); err != nil {
		return nil, err
	}
	return &runtimeapi.CheckpointContainerResponse{}, nil
}

// CheckpointPod implements RuntimeService.
func (s *runtimeService) CheckpointPod(ctx context.Context,
	req *runtimeapi.CheckpointPodRequest) (*runtimeapi.CheckpointPodResponse, error) {
	if err := need(
		field{"pod_sandbox_id", req.GetPodSandboxId() != ""},
		field{"output_path", filepath.IsAbs(req.GetOutputPath())},
		field{"container_ids", len(req.GetContainerIds()) > 0},
	); err != nil {
		return nil, err
	}
	err := s.pods.CheckpointPod(ctx, req.GetPodSandboxId(), req.GetOutputPath(), req.GetContainerIds(), req.GetOptions())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.CheckpointPodResponse{}, nil
}
