package server

import (
	"context"
	"iter"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/server/metrics"
)

// ListMetricDescriptors implements RuntimeService.
func (s *runtimeService) ListMetricDescriptors(context.Context,
	*runtimeapi.ListMetricDescriptorsRequest) (*runtimeapi.ListMetricDescriptorsResponse, error) {
	return &runtimeapi.ListMetricDescriptorsResponse{Descriptors: metrics.Descriptors()}, nil
}

// ListPodSandboxMetrics implements RuntimeService.
func (s *runtimeService) ListPodSandboxMetrics(ctx context.Context,
	_ *runtimeapi.ListPodSandboxMetricsRequest) (*runtimeapi.ListPodSandboxMetricsResponse, error) {
	resp := &runtimeapi.ListPodSandboxMetricsResponse{}
	for pod := range s.allPodMetrics(ctx) {
		resp.PodMetrics = append(resp.PodMetrics, pod)
	}
	return resp, ctx.Err()
}

// StreamPodSandboxMetrics implements RuntimeService.
func (s *runtimeService) StreamPodSandboxMetrics(_ *runtimeapi.StreamPodSandboxMetricsRequest,
	stream runtimeapi.RuntimeService_StreamPodSandboxMetricsServer) error {
	return sendBatches(s.allPodMetrics(stream.Context()), func(batch []*runtimeapi.PodSandboxMetrics) error {
		return stream.Send(&runtimeapi.StreamPodSandboxMetricsResponse{PodSandboxMetrics: batch})
	})
}

// allPodMetrics yields the metrics of the ready pods.
func (s *runtimeService) allPodMetrics(ctx context.Context) iter.Seq[*runtimeapi.PodSandboxMetrics] {
	return func(yield func(*runtimeapi.PodSandboxMetrics) bool) {
		filesystem := s.pods.WritableFilesystem()
		for stats := range s.allPodStats(ctx, nil) {
			pod := &runtimeapi.PodSandboxMetrics{PodSandboxId: stats.Info.ID, Metrics: metrics.OfPod(&stats)}
			for _, c := range stats.Containers {
				detail, err := s.pods.ContainerDetail(c.Info.ID)
				if err != nil {
					s.unmeasured.details.Warn(s.log, "measure details of container", "container", c.Info.ID, "error", err)
					continue
				}
				pod.ContainerMetrics = append(pod.ContainerMetrics, &runtimeapi.ContainerMetrics{ContainerId: c.Info.ID,
					Metrics: metrics.OfContainer(stats.Info, s.containerImage(c.Info).GetImage(), &c, detail, &filesystem)})
			}
			if !yield(pod) {
				return
			}
		}
	}
}
