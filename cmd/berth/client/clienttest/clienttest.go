// Package clienttest is a CRI runtime for tests of the commands. It is a real gRPC server on a unix
// socket, with a small state machine that enforces the order of calls.
package clienttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/server/admin"
)

// Program is the behavior of a container.
type Program struct {
	Output []string // output lines at its start, each a CRI stream and text: "stdout hello"
	// Exits are the exit codes of the attempts. Later attempts run until they are stopped.
	Exits []int32
	// Stubborn programs ignore the stop signal and end only without a grace period.
	Stubborn bool
	StartErr error // error of StartContainer
}

// Server is the runtime. Fields may be set until the first call.
type Server struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	runtimeapi.UnimplementedImageServiceServer

	Programs map[string]Program // by container name; without an entry it runs until it is stopped
	// Hook, if not nil, is called with each entry of Calls before the call. Its error fails the
	// call.
	Hook func(ctx context.Context, call string) error
	// LoseSandbox makes RunPodSandbox create the pod but report an error.
	LoseSandbox bool
	ExecCode    int32 // of ExecSync, whose stderr is the command, one word per line
	// Sessions returns the URLs of exec and attach sessions.
	Sessions interface {
		Exec(*runtimeapi.ExecRequest) (string, error)
		Attach(*runtimeapi.AttachRequest) (string, error)
	}
	Kept      admin.Starts // nil: the runtime is not berth
	PullsInfo string       // JSON of "pulls" in a verbose Status
	Config    string       // JSON of "config" there; not empty: the runtime is called berth
	Registry  map[string]*runtimeapi.Image

	missed chan struct{} // a ContainerStatus failed because of away

	mu         sync.Mutex // guards what follows
	calls      []string
	pods       map[string]*pod
	containers map[string]*container
	images     map[string]*runtimeapi.Image
	next       int
	away       bool
}

type pod struct {
	id      string
	config  *runtimeapi.PodSandboxConfig
	state   runtimeapi.PodSandboxState
	created time.Time
}

type container struct {
	id, podID string
	config    *runtimeapi.ContainerConfig
	status    *runtimeapi.ContainerStatus
	ended     chan struct{}
}

// Start serves s on a new socket until the test ends, and returns its address.
func Start(t testing.TB, s *Server) string {
	t.Helper()
	s.missed = make(chan struct{})
	s.pods, s.containers, s.images = map[string]*pod{}, map[string]*container{}, map[string]*runtimeapi.Image{}
	dir, err := os.MkdirTemp("", "clienttest") // t.TempDir can be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(g, s)
	runtimeapi.RegisterImageServiceServer(g, s)
	if s.Kept != nil {
		admin.RegisterStarts(g, s.Kept)
	}
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	t.Cleanup(func() {
		g.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) { // before the server served
			t.Errorf("serve: %v", err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return "unix://" + filepath.Join(dir, "s")
}

// Calls returns the modifying calls, in order.
func (s *Server) Calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// PodConfigs returns the configs of existing pods.
func (s *Server) PodConfigs() []*runtimeapi.PodSandboxConfig {
	s.mu.Lock()
	defer s.mu.Unlock()
	var configs []*runtimeapi.PodSandboxConfig
	for _, p := range s.pods {
		configs = append(configs, p.config)
	}
	return configs
}

// Left returns the IDs of existing pods and containers.
func (s *Server) Left() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var left []string
	for id := range s.pods {
		left = append(left, id)
	}
	for id := range s.containers {
		left = append(left, id)
	}
	slices.Sort(left)
	return left
}

// Unavailable(true) makes ContainerStatus fail as during a runtime's restart, until
// Unavailable(false). It returns after at least one such failure.
func (s *Server) Unavailable(away bool) {
	s.mu.Lock()
	s.away = away
	s.mu.Unlock()
	if away {
		<-s.missed
	}
}

// Configs returns the configs of existing containers, oldest first.
func (s *Server) Configs() []*runtimeapi.ContainerConfig {
	s.mu.Lock()
	defer s.mu.Unlock()
	var configs []*runtimeapi.ContainerConfig
	for _, id := range slices.Sorted(maps.Keys(s.containers)) { // IDs ascend
		configs = append(configs, s.containers[id].config)
	}
	return configs
}

// note records a call and calls the hook.
func (s *Server) note(ctx context.Context, format string, args ...any) error {
	call := fmt.Sprintf(format, args...)
	s.mu.Lock()
	s.calls = append(s.calls, call)
	s.mu.Unlock()
	if s.Hook != nil {
		return s.Hook(ctx, call)
	}
	return nil
}

func (s *Server) newID(kind string) string {
	s.next++
	return fmt.Sprintf("%s%062x", kind, s.next)
}

func (s *Server) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	if s.Config != "" {
		return &runtimeapi.VersionResponse{RuntimeName: "berth"}, nil
	}
	return &runtimeapi.VersionResponse{RuntimeName: "fake"}, nil
}

func (s *Server) Status(_ context.Context, r *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	reply := &runtimeapi.StatusResponse{RuntimeHandlers: []*runtimeapi.RuntimeHandler{
		{Name: "", Features: &runtimeapi.RuntimeHandlerFeatures{RecursiveReadOnlyMounts: true}},
	}}
	if r.GetVerbose() {
		reply.Info = map[string]string{"pulls": s.PullsInfo}
		if s.Config != "" {
			reply.Info["config"] = s.Config
		}
	}
	return reply, nil
}

func (s *Server) RunPodSandbox(ctx context.Context,
	r *runtimeapi.RunPodSandboxRequest) (*runtimeapi.RunPodSandboxResponse, error) {
	name := r.GetConfig().GetMetadata().GetName()
	if err := s.note(ctx, "RunPodSandbox %s", name); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &pod{id: s.newID("a"), config: r.GetConfig(), created: time.Now()}
	s.pods[p.id] = p
	if s.LoseSandbox {
		return nil, status.Errorf(codes.DeadlineExceeded, "run pod %s", name)
	}
	return &runtimeapi.RunPodSandboxResponse{PodSandboxId: p.id}, nil
}

// RestorePod creates the pod and its containers. It does not read the checkpoint.
func (s *Server) RestorePod(ctx context.Context, r *runtimeapi.RestorePodRequest) (*runtimeapi.RestorePodResponse, error) {
	if err := s.note(ctx, "RestorePod %s", r.GetConfig().GetMetadata().GetName()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &pod{id: s.newID("a"), config: r.GetConfig(), created: time.Now()}
	s.pods[p.id] = p
	reply := &runtimeapi.RestorePodResponse{PodSandboxId: p.id}
	for _, config := range r.GetContainerConfigs() {
		reply.RestoredContainers = append(reply.RestoredContainers,
			&runtimeapi.RestoredContainer{Name: config.GetMetadata().GetName(), ContainerId: s.addContainer(p, config).id})
	}
	return reply, nil
}

func (s *Server) StopPodSandbox(ctx context.Context,
	r *runtimeapi.StopPodSandboxRequest) (*runtimeapi.StopPodSandboxResponse, error) {
	if err := s.note(ctx, "StopPodSandbox"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.pods[r.GetPodSandboxId()]; p != nil {
		p.state = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
		for _, c := range s.containers {
			if c.podID == p.id {
				c.end(137)
			}
		}
	}
	return &runtimeapi.StopPodSandboxResponse{}, nil
}

func (s *Server) RemovePodSandbox(ctx context.Context,
	r *runtimeapi.RemovePodSandboxRequest) (*runtimeapi.RemovePodSandboxResponse, error) {
	if err := s.note(ctx, "RemovePodSandbox"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, c := range s.containers {
		if c.podID == r.GetPodSandboxId() {
			c.end(137)
			delete(s.containers, id)
		}
	}
	delete(s.pods, r.GetPodSandboxId())
	return &runtimeapi.RemovePodSandboxResponse{}, nil
}

func (s *Server) PodSandboxStatus(_ context.Context,
	r *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[r.GetPodSandboxId()]
	if p == nil {
		return nil, status.Errorf(codes.NotFound, "pod sandbox %s not found", r.GetPodSandboxId())
	}
	return &runtimeapi.PodSandboxStatusResponse{Status: &runtimeapi.PodSandboxStatus{
		Id: p.id, Metadata: p.config.GetMetadata(), State: p.state, CreatedAt: p.created.UnixNano(),
		Network: &runtimeapi.PodSandboxNetworkStatus{Ip: "10.0.0.2", AdditionalIps: []*runtimeapi.PodIP{{Ip: "fd00::2"}}},
		Linux: &runtimeapi.LinuxPodSandboxStatus{Namespaces: &runtimeapi.Namespace{
			Options: p.config.GetLinux().GetSecurityContext().GetNamespaceOptions()}},
	}}, nil
}

func (s *Server) ListPodSandbox(context.Context,
	*runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	reply := &runtimeapi.ListPodSandboxResponse{}
	for _, p := range s.pods {
		reply.Items = append(reply.Items, &runtimeapi.PodSandbox{
			Id: p.id, Metadata: p.config.GetMetadata(), State: p.state, CreatedAt: p.created.UnixNano(), Labels: p.config.GetLabels(),
		})
	}
	return reply, nil
}
