package server

import (
	"context"
	"maps"
	"slices"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// RestorePod implements RuntimeService. It has no options.
func (s *runtimeService) RestorePod(ctx context.Context,
	req *runtimeapi.RestorePodRequest) (*runtimeapi.RestorePodResponse, error) {
	metadata := req.GetConfig().GetMetadata()
	if err := need(
		field{"checkpoint_path", req.GetCheckpointPath() != ""},
		field{"config", req.GetConfig() != nil},
		field{"config.metadata", metadata != nil},
		field{"config.metadata.name", metadata.GetName() != ""},
		field{"config.metadata.namespace", metadata.GetNamespace() != ""},
		field{"container_configs", len(req.GetContainerConfigs()) > 0},
	); err != nil {
		return nil, err
	}
	if options := req.GetOptions(); len(options) > 0 {
		return nil, errdefs.InvalidArgument("unknown options %q", slices.Sorted(maps.Keys(options)))
	}
	id, containers, err := s.pods.RestorePod(ctx, state.RestoreRequest{
		Path: req.GetCheckpointPath(), Config: req.GetConfig(), Handler: req.GetRuntimeHandler(),
		Containers: req.GetContainerConfigs(),
	})
	if err != nil {
		return nil, err
	}
	resp := &runtimeapi.RestorePodResponse{PodSandboxId: id}
	for _, c := range containers {
		resp.RestoredContainers = append(resp.RestoredContainers,
			&runtimeapi.RestoredContainer{Name: c.Name, ContainerId: c.ID})
	}
	return resp, nil
}
