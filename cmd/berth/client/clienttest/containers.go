package clienttest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// name returns the container's name and attempt, as Calls lists them.
func (c *container) name() string {
	m := c.config.GetMetadata()
	return fmt.Sprintf("%s/%d", m.GetName(), m.GetAttempt())
}

// end makes a running or created container exit. It does not change an exited container.
func (c *container) end(code int32) {
	if c.status.State == runtimeapi.ContainerState_CONTAINER_EXITED {
		return
	}
	c.status.State, c.status.ExitCode = runtimeapi.ContainerState_CONTAINER_EXITED, code
	c.status.FinishedAt = time.Now().UnixNano()
	close(c.ended)
}

func (s *Server) find(id string) (*container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.containers[id]; c != nil {
		return c, nil
	}
	return nil, status.Errorf(codes.NotFound, "container %s not found", id)
}

func (s *Server) CreateContainer(ctx context.Context,
	r *runtimeapi.CreateContainerRequest) (*runtimeapi.CreateContainerResponse, error) {
	config := r.GetConfig()
	if err := s.note(ctx, "CreateContainer %s", (&container{config: config}).name()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[r.GetPodSandboxId()]
	switch {
	case p == nil || p.state != runtimeapi.PodSandboxState_SANDBOX_READY:
		return nil, status.Errorf(codes.FailedPrecondition, "pod %s is not ready", r.GetPodSandboxId())
	case s.images[config.GetImage().GetImage()] == nil:
		return nil, status.Errorf(codes.NotFound, "image %s not found", config.GetImage().GetImage())
	}
	return &runtimeapi.CreateContainerResponse{ContainerId: s.addContainer(p, config).id}, nil
}

// addContainer adds a created container. The caller holds s.mu.
func (s *Server) addContainer(p *pod, config *runtimeapi.ContainerConfig) *container {
	c := &container{id: s.newID("c"), podID: p.id, config: config, ended: make(chan struct{})}
	c.status = &runtimeapi.ContainerStatus{
		Id: c.id, Metadata: config.GetMetadata(), CreatedAt: time.Now().UnixNano(), Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
		Image: config.GetImage(), LogPath: filepath.Join(p.config.GetLogDirectory(), config.GetLogPath()),
	}
	s.containers[c.id] = c
	return c
}

func (s *Server) StartContainer(ctx context.Context,
	r *runtimeapi.StartContainerRequest) (*runtimeapi.StartContainerResponse, error) {
	c, err := s.find(r.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.note(ctx, "StartContainer %s", c.name()); err != nil {
		return nil, err
	}
	program := s.Programs[c.config.GetMetadata().GetName()]
	if program.StartErr != nil {
		return nil, program.StartErr
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.status.State != runtimeapi.ContainerState_CONTAINER_CREATED {
		return nil, status.Errorf(codes.FailedPrecondition, "container %s is not created", c.name())
	}
	if err := writeLog(c.status.LogPath, program.Output); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	c.status.State, c.status.StartedAt = runtimeapi.ContainerState_CONTAINER_RUNNING, time.Now().UnixNano()
	if attempt := int(c.config.GetMetadata().GetAttempt()); attempt < len(program.Exits) {
		c.end(program.Exits[attempt])
	}
	return &runtimeapi.StartContainerResponse{}, nil
}

func writeLog(path string, lines []string) error {
	var text strings.Builder
	for _, line := range lines {
		stream, content, _ := strings.Cut(line, " ")
		fmt.Fprintf(&text, "%s %s F %s\n", time.Now().Format(time.RFC3339Nano), stream, content)
	}
	return os.WriteFile(path, []byte(text.String()), 0o600)
}

func (s *Server) StopContainer(ctx context.Context,
	r *runtimeapi.StopContainerRequest) (*runtimeapi.StopContainerResponse, error) {
	c, err := s.find(r.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.note(ctx, "StopContainer %s %d", c.name(), r.GetTimeout()); err != nil {
		return nil, err
	}
	if r.GetTimeout() > 0 && s.Programs[c.config.GetMetadata().GetName()].Stubborn {
		select {
		case <-c.ended:
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.GetTimeout() > 0 {
		c.end(143)
	}
	c.end(137)
	return &runtimeapi.StopContainerResponse{}, nil
}

func (s *Server) RemoveContainer(ctx context.Context,
	r *runtimeapi.RemoveContainerRequest) (*runtimeapi.RemoveContainerResponse, error) {
	c, err := s.find(r.GetContainerId())
	if err != nil {
		return &runtimeapi.RemoveContainerResponse{}, nil
	}
	if err := s.note(ctx, "RemoveContainer %s", c.name()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.end(137)
	delete(s.containers, c.id)
	return &runtimeapi.RemoveContainerResponse{}, nil
}

func (s *Server) ContainerStatus(ctx context.Context,
	r *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	s.mu.Lock()
	away := s.away
	s.mu.Unlock()
	if away {
		select {
		case s.missed <- struct{}{}:
		case <-ctx.Done():
		}
		return nil, status.Error(codes.Unavailable, "restarting")
	}
	c, err := s.find(r.GetContainerId())
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return &runtimeapi.ContainerStatusResponse{Status: &runtimeapi.ContainerStatus{
		Id: c.id, Metadata: c.config.GetMetadata(), State: c.status.State,
		CreatedAt: c.status.CreatedAt, StartedAt: c.status.StartedAt, FinishedAt: c.status.FinishedAt,
		ExitCode: c.status.ExitCode, LogPath: c.status.LogPath,
	}}, nil
}

func (s *Server) ListContainers(context.Context,
	*runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	reply := &runtimeapi.ListContainersResponse{}
	for _, c := range s.containers {
		reply.Containers = append(reply.Containers, &runtimeapi.Container{
			Id: c.id, PodSandboxId: c.podID, Metadata: c.config.GetMetadata(), Image: c.config.GetImage(),
			State: c.status.State, CreatedAt: c.status.CreatedAt, Labels: c.config.GetLabels(), Annotations: c.config.GetAnnotations(),
		})
	}
	return reply, nil
}

func (s *Server) ExecSync(ctx context.Context, r *runtimeapi.ExecSyncRequest) (*runtimeapi.ExecSyncResponse, error) {
	c, err := s.find(r.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.note(ctx, "ExecSync %s %s", c.name(), strings.Join(r.GetCmd(), " ")); err != nil {
		return nil, err
	}
	return &runtimeapi.ExecSyncResponse{
		ExitCode: s.ExecCode, Stderr: []byte(strings.Join(r.GetCmd(), "\n") + "\n"),
	}, nil
}

func (s *Server) Exec(ctx context.Context, r *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	c, err := s.find(r.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.note(ctx, "Exec %s %s", c.name(), strings.Join(r.GetCmd(), " ")); err != nil {
		return nil, err
	}
	url, err := s.Sessions.Exec(r)
	return &runtimeapi.ExecResponse{Url: url}, err
}

func (s *Server) Attach(ctx context.Context, r *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	c, err := s.find(r.GetContainerId())
	if err != nil {
		return nil, err
	}
	if err := s.note(ctx, "Attach %s", c.name()); err != nil {
		return nil, err
	}
	url, err := s.Sessions.Attach(r)
	return &runtimeapi.AttachResponse{Url: url}, err
}

func (s *Server) PullImage(ctx context.Context, r *runtimeapi.PullImageRequest) (*runtimeapi.PullImageResponse, error) {
	ref := r.GetImage().GetImage()
	if err := s.note(ctx, "PullImage %s", ref); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	image := s.Registry[ref]
	if image == nil {
		return nil, status.Errorf(codes.NotFound, "%s: manifest unknown", ref)
	}
	s.images[ref], s.images[image.GetId()] = image, image
	return &runtimeapi.PullImageResponse{ImageRef: image.GetId()}, nil
}

func (s *Server) ImageStatus(_ context.Context,
	r *runtimeapi.ImageStatusRequest) (*runtimeapi.ImageStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &runtimeapi.ImageStatusResponse{Image: s.images[r.GetImage().GetImage()]}, nil
}

func (s *Server) ListImages(context.Context, *runtimeapi.ListImagesRequest) (*runtimeapi.ListImagesResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	reply := &runtimeapi.ListImagesResponse{}
	seen := map[string]bool{}
	for _, image := range s.images {
		if !seen[image.GetId()] {
			seen[image.GetId()] = true
			reply.Images = append(reply.Images, image)
		}
	}
	return reply, nil
}
