package server

import (
	"context"
	"math"
	"slices"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

// CreateContainer implements RuntimeService. Of the pod's config in the request it uses only
// whether the pod is privileged. The manager has the config of RunPodSandbox.
func (s *runtimeService) CreateContainer(ctx context.Context,
	req *runtimeapi.CreateContainerRequest) (*runtimeapi.CreateContainerResponse, error) {
	cfg := req.GetConfig()
	if err := need(
		field{"pod_sandbox_id", req.GetPodSandboxId() != ""},
		field{"config", cfg != nil},
		field{"config.metadata", cfg.GetMetadata() != nil},
		field{"config.metadata.name", cfg.GetMetadata().GetName() != ""},
		field{"config.image.image", cfg.GetImage().GetImage() != ""},
	); err != nil {
		return nil, err
	}
	id, err := s.pods.CreateContainer(ctx, req.GetPodSandboxId(), cfg, req.GetSandboxConfig())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.CreateContainerResponse{ContainerId: id}, nil
}

// StartContainer implements RuntimeService.
func (s *runtimeService) StartContainer(ctx context.Context,
	req *runtimeapi.StartContainerRequest) (*runtimeapi.StartContainerResponse, error) {
	if err := need(field{"container_id", req.GetContainerId() != ""}); err != nil {
		return nil, err
	}
	if err := s.pods.StartContainer(ctx, req.GetContainerId()); err != nil {
		return nil, err
	}
	return &runtimeapi.StartContainerResponse{}, nil
}

// StopContainer implements RuntimeService.
func (s *runtimeService) StopContainer(ctx context.Context,
	req *runtimeapi.StopContainerRequest) (*runtimeapi.StopContainerResponse, error) {
	if err := need(field{"container_id", req.GetContainerId() != ""}); err != nil {
		return nil, err
	}
	timeout, err := seconds("timeout", req.GetTimeout())
	if err != nil {
		return nil, err
	}
	if err := s.pods.StopContainer(ctx, req.GetContainerId(), timeout); err != nil {
		return nil, err
	}
	return &runtimeapi.StopContainerResponse{}, nil
}

// RemoveContainer implements RuntimeService.
func (s *runtimeService) RemoveContainer(ctx context.Context,
	req *runtimeapi.RemoveContainerRequest) (*runtimeapi.RemoveContainerResponse, error) {
	if err := need(field{"container_id", req.GetContainerId() != ""}); err != nil {
		return nil, err
	}
	if err := s.pods.RemoveContainer(ctx, req.GetContainerId()); err != nil {
		return nil, err
	}
	return &runtimeapi.RemoveContainerResponse{}, nil
}

// listContainers implements ListContainers (see encodedLists).
func (s *runtimeService) listContainers(req *runtimeapi.ListContainersRequest) (encoded, error) {
	return s.encodedContainers(req.GetFilter())
}

// encodedContainers returns a list of containers, oldest first.
func (s *runtimeService) encodedContainers(filter *runtimeapi.ContainerFilter) (encoded, error) {
	keep := func(c *state.Container) *state.Answer {
		if namedByID(c) { // the image may get other names
			return nil
		}
		return c.Listed
	}
	return encodedItems(s.filterContainers(filter), keep, s.containerItem)
}

// filterContainers returns the containers that match, oldest first.
func (s *runtimeService) filterContainers(filter *runtimeapi.ContainerFilter) []*state.Container {
	containers := s.pods.Containers()
	id, known := resolve(filter.GetId(), containers, func(c *state.Container) string { return c.ID })
	pod, podKnown := filter.GetPodSandboxId(), true
	if pod != "" {
		pod, podKnown = resolve(pod, s.pods.Pods(), func(p *state.Pod) string { return p.ID })
	}
	if !known || !podKnown {
		return nil
	}
	return slices.DeleteFunc(containers, func(c *state.Container) bool {
		return id != "" && c.ID != id ||
			pod != "" && c.PodID != pod ||
			filter.GetState() != nil && filter.GetState().GetState() != c.State() ||
			!selected(filter.GetLabelSelector(), c.Config.GetLabels())
	})
}

// ContainerStatus implements RuntimeService.
func (s *runtimeService) ContainerStatus(ctx context.Context,
	req *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	if err := need(field{"container_id", req.GetContainerId() != ""}); err != nil {
		return nil, err
	}
	c, err := s.pods.Container(req.GetContainerId())
	if err != nil {
		return nil, err
	}
	resp := &runtimeapi.ContainerStatusResponse{Status: s.containerStatus(c)}
	if req.GetVerbose() {
		resp.Info, err = infoMap(map[string]any{"info": s.containerDetail(ctx, c)})
		if err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// containerDetail is the additional part of verbose ContainerStatus. It uses the names of other
// runtimes for users of crictl.
type containerDetail struct {
	PID    int                         `json:"pid"`
	PodID  string                      `json:"sandboxID"`
	Config *runtimeapi.ContainerConfig `json:"config"`

	Spec      *specs.Spec `json:"runtimeSpec,omitempty"`
	SpecError string      `json:"runtimeSpecError,omitempty"` // for example because a mount's source was removed
}

func (s *runtimeService) containerDetail(ctx context.Context, c *state.Container) containerDetail {
	detail := containerDetail{PID: c.PID, PodID: c.PodID, Config: c.Config}
	spec, err := s.pods.RuntimeSpec(ctx, c.ID)
	if err != nil {
		detail.SpecError = err.Error()
	}
	detail.Spec = spec
	return detail
}

// UpdateContainerResources implements RuntimeService. It ignores the request's annotations.
func (s *runtimeService) UpdateContainerResources(ctx context.Context,
	req *runtimeapi.UpdateContainerResourcesRequest) (*runtimeapi.UpdateContainerResourcesResponse, error) {
	if err := need(
		field{"container_id", req.GetContainerId() != ""},
		field{"linux", req.GetLinux() != nil},
	); err != nil {
		return nil, err
	}
	if err := s.pods.UpdateContainerResources(ctx, req.GetContainerId(), req.GetLinux()); err != nil {
		return nil, err
	}
	return &runtimeapi.UpdateContainerResourcesResponse{}, nil
}

// ReopenContainerLog implements RuntimeService.
func (s *runtimeService) ReopenContainerLog(ctx context.Context,
	req *runtimeapi.ReopenContainerLogRequest) (*runtimeapi.ReopenContainerLogResponse, error) {
	if err := need(field{"container_id", req.GetContainerId() != ""}); err != nil {
		return nil, err
	}
	if err := s.pods.ReopenContainerLog(ctx, req.GetContainerId()); err != nil {
		return nil, err
	}
	return &runtimeapi.ReopenContainerLogResponse{}, nil
}

// ExecSync implements RuntimeService. It returns DeadlineExceeded for a command that exceeds its
// timeout, so that kubelet can distinguish a slow probe from a failed one.
func (s *runtimeService) ExecSync(ctx context.Context,
	req *runtimeapi.ExecSyncRequest) (*runtimeapi.ExecSyncResponse, error) {
	if err := need(
		field{"container_id", req.GetContainerId() != ""},
		field{"cmd", len(req.GetCmd()) > 0},
	); err != nil {
		return nil, err
	}
	timeout, err := seconds("timeout", req.GetTimeout())
	if err != nil {
		return nil, err
	}
	result, err := s.pods.ExecSync(ctx, req.GetContainerId(), req.GetCmd(), timeout)
	if err != nil {
		return nil, err
	}
	stdout, stderr := fit(result.Stdout, result.Stderr, maxOutput)
	return &runtimeapi.ExecSyncResponse{Stdout: stdout, Stderr: stderr, ExitCode: result.ExitCode}, nil
}

// maxOutput is the size in bytes of the largest output in an ExecSyncResponse. The rest of a
// message holds the tags, two lengths and the exit code.
const maxOutput = MaxMessage - 64

// fit shortens two outputs to limit bytes together. Each may have at least half. The rest is
// discarded, and this is no error, because the API requires that (CVE-2022-1708).
func fit(stdout, stderr []byte, limit int) (out, err []byte) {
	if len(stdout)+len(stderr) <= limit {
		return stdout, stderr
	}
	roomForErr := max(limit/2, limit-len(stdout))
	stderr = stderr[:min(len(stderr), roomForErr)]
	return stdout[:min(len(stdout), limit-len(stderr))], stderr
}

// seconds converts a request's number of seconds. Values beyond time.Duration's range become its
// maximum, 292 years.
func seconds(name string, n int64) (time.Duration, error) {
	if n < 0 {
		return 0, errdefs.InvalidArgument("%s: %d seconds is negative", name, n)
	}
	if n > int64(math.MaxInt64/time.Second) {
		return math.MaxInt64, nil
	}
	return time.Duration(n) * time.Second, nil
}

// containerStatuses returns the statuses of a pod's containers, newest first. kubelet treats the
// first of several containers with the same name as the current one (EventedPLEG, 1.36).
func (s *runtimeService) containerStatuses(pod string) []*runtimeapi.ContainerStatus {
	var all []*runtimeapi.ContainerStatus
	for _, c := range slices.Backward(s.pods.Containers()) {
		if c.PodID == pod {
			all = append(all, s.containerStatus(c))
		}
	}
	return all
}

func (s *runtimeService) containerItem(c *state.Container) *runtimeapi.Container {
	return &runtimeapi.Container{
		Id:           c.ID,
		PodSandboxId: c.PodID,
		Metadata:     c.Config.GetMetadata(),
		Image:        s.containerImage(c),
		ImageRef:     c.ImageRef(),
		ImageId:      c.Image.ID,
		State:        c.State(),
		CreatedAt:    c.CreatedAt.UnixNano(),
		Labels:       c.Config.GetLabels(),
		Annotations:  c.Config.GetAnnotations(),
	}
}

func (s *runtimeService) containerStatus(c *state.Container) *runtimeapi.ContainerStatus {
	exit := c.Ended()
	status := &runtimeapi.ContainerStatus{
		Id:          c.ID,
		Metadata:    c.Config.GetMetadata(),
		State:       c.State(),
		CreatedAt:   c.CreatedAt.UnixNano(),
		StartedAt:   nanos(c.StartedAt),
		FinishedAt:  nanos(exit.FinishedAt),
		ExitCode:    exit.Code,
		Image:       s.containerImage(c),
		ImageRef:    c.ImageRef(),
		ImageId:     c.Image.ID,
		Reason:      exit.Reason,
		Message:     exit.Message,
		Labels:      c.Config.GetLabels(),
		Annotations: c.Config.GetAnnotations(),
		Mounts:      c.Mounts(),
		LogPath:     c.LogPath,
		User:        c.User.CRI(),
		StopSignal:  c.StopSignal(),
	}
	if c.Resources != nil {
		status.Resources = &runtimeapi.ContainerResources{Linux: c.Resources}
	}
	return status
}

// nanos returns a time in CRI's encoding, in which 0 means no time.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// containerImage returns the image of a container under the name that its user specified. kubelet
// names the image by ID, and sends the name in the pod's manifest as user_specified_image. Other
// clients send a name. If the request has only an ID, containerImage returns a present name of the
// image.
func (s *runtimeService) containerImage(c *state.Container) *runtimeapi.ImageSpec {
	asked := c.Config.GetImage()
	spec := &runtimeapi.ImageSpec{
		Image:              asked.GetImage(),
		Annotations:        asked.GetAnnotations(),
		UserSpecifiedImage: asked.GetUserSpecifiedImage(),
		RuntimeHandler:     asked.GetRuntimeHandler(),
	}
	if spec.UserSpecifiedImage != "" {
		spec.Image = spec.UserSpecifiedImage
	} else if namedByID(c) {
		spec.Image = imageName(s.images, c.Image.ID)
	}
	return spec
}

// namedByID reports whether the request named the container's image only by ID.
func namedByID(c *state.Container) bool {
	asked := c.Config.GetImage()
	return asked.GetUserSpecifiedImage() == "" && isID(asked.GetImage(), c.Image.ID)
}
