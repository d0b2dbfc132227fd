package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path"
	"runtime/debug"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/distribution/reference"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/state"
)

const (
	// cadvisorNamespace is the namespace that Kubernetes uses in containerd.
	cadvisorNamespace = "k8s.io"
	namespaceHeader   = "containerd-namespace"

	// kindLabel tells cAdvisor which container of a pod owns the pod's network (cAdvisor's
	// containerd/handler.go).
	kindLabel     = "io.cri-containerd.kind"
	kindSandbox   = "sandbox"
	kindContainer = "container"

	// specType is containerd's type name of a runtime-spec in JSON.
	specType = "types.containerd.io/opencontainers/runtime-spec/1/Spec"

	// ownPauseImage stands for the built-in pause, which has no image. It becomes the label image
	// of a pod's network metrics, because dashboards omit metrics that have no image.
	ownPauseImage = "localhost/berth-pause:built-in"

	cadvisorMaxRequest     = 64 << 10 // bytes; a request has an ID and little else
	cadvisorConnectTimeout = 5 * time.Second
)

// CadvisorPods is the part of the sandbox manager that Cadvisor uses. Its methods read snapshots.
type CadvisorPods interface {
	// PodOrPlanned returns the pod with exactly this ID, even if its creation is in progress,
	// because cAdvisor asks as soon as the cgroup exists.
	PodOrPlanned(id string) (*state.Pod, error)
	Container(id string) (*state.Container, error)
}

// CadvisorConfig has the static answers of Cadvisor.
type CadvisorConfig struct {
	Version    string // of berth
	PauseImage string // "": the built-in pause
}

// Cadvisor implements the calls of containerd's API that cAdvisor makes: Version, and Get of
// containers and tasks. cAdvisor, which is part of kubelet, finds containers' cgroups only through
// containerd and CRI-O. Other calls return Unimplemented. Use NewCadvisor.
type Cadvisor struct {
	grpc *grpc.Server
}

// NewCadvisor returns a server that answers from the snapshots of pods and images.
func NewCadvisor(cfg CadvisorConfig, pods CadvisorPods, images Images, log *slog.Logger) *Cadvisor {
	s := &cadvisorService{cfg: cfg, pods: pods, images: images, log: log}
	c := &Cadvisor{grpc: grpc.NewServer(
		grpc.MaxRecvMsgSize(cadvisorMaxRequest),
		grpc.ConnectionTimeout(cadvisorConnectTimeout),
		grpc.WaitForHandlers(true),
		grpc.Creds(peerCredentials{log: log, begun: func() {}}),
		grpc.UnaryInterceptor(s.unary),
	)}
	versionapi.RegisterVersionServer(c.grpc, cadvisorVersion{service: s})
	containersapi.RegisterContainersServer(c.grpc, cadvisorContainers{service: s})
	tasksapi.RegisterTasksServer(c.grpc, cadvisorTasks{service: s})
	return c
}

// Serve answers requests on l until Stop is called, and then returns nil. It closes l.
func (c *Cadvisor) Serve(l net.Listener) error {
	if err := c.grpc.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serve containerd's API for cAdvisor on %s: %w", l.Addr(), err)
	}
	return nil
}

// Stop ends Serve and all connections. Requests are answered from memory, so no request takes long.
func (c *Cadvisor) Stop() { c.grpc.Stop() }

// cadvisorService answers from snapshots of pods and images.
type cadvisorService struct {
	cfg    CadvisorConfig
	pods   CadvisorPods
	images Images
	log    *slog.Logger
}

// unary wraps every call.
func (s *cadvisorService) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (resp any, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.log.Error("panic", "method", info.FullMethod, "panic", p, "stack", string(debug.Stack()))
			resp, err = nil, status.Errorf(codes.Internal, "%s: internal error, see berth's log",
				path.Base(info.FullMethod))
		}
		err = coded(err)
	}()
	return handler(ctx, req)
}

// checkNamespace refuses calls for namespaces other than Kubernetes'.
func checkNamespace(ctx context.Context) error {
	namespaces := metadata.ValueFromIncomingContext(ctx, namespaceHeader)
	if len(namespaces) == 0 {
		return errdefs.FailedPrecondition("the header %s is missing", namespaceHeader)
	}
	if namespaces[0] != cadvisorNamespace {
		return errdefs.NotFound("namespace %q has no containers, only %s", namespaces[0], cadvisorNamespace)
	}
	return nil
}

// find returns the container with this ID, or the pod whose pause has this ID.
func (s *cadvisorService) find(ctx context.Context, id string) (*state.Container, *state.Pod, error) {
	if err := checkNamespace(ctx); err != nil {
		return nil, nil, err
	}
	if c, err := s.pods.Container(id); err == nil && c.ID == id { // no prefixes of IDs
		return c, nil, nil
	}
	p, err := s.pods.PodOrPlanned(id)
	if err != nil {
		return nil, nil, errdefs.NotFound("no container or pod sandbox has the ID %q", id)
	}
	return nil, p, nil
}

// cadvisorVersion implements containerd's service Version.
type cadvisorVersion struct {
	versionapi.UnimplementedVersionServer
	service *cadvisorService
}

// Version implements VersionServer. It returns berth's version, so that clients do not mistake
// berth for containerd.
func (v cadvisorVersion) Version(context.Context, *emptypb.Empty) (*versionapi.VersionResponse, error) {
	return &versionapi.VersionResponse{Version: v.service.cfg.Version, Revision: "berth"}, nil
}

// cadvisorContainers implements Get of containerd's service Containers.
type cadvisorContainers struct {
	containersapi.UnimplementedContainersServer
	service *cadvisorService
}

// Get implements ContainersServer.
func (c cadvisorContainers) Get(ctx context.Context,
	req *containersapi.GetContainerRequest) (*containersapi.GetContainerResponse, error) {
	s := c.service
	container, pod, err := s.find(ctx, req.GetID())
	if err != nil {
		return nil, err
	}
	var answer *containersapi.Container
	if container != nil {
		answer, err = s.ofContainer(container)
	} else {
		answer, err = s.ofPause(pod)
	}
	if err != nil {
		return nil, err
	}
	return &containersapi.GetContainerResponse{Container: answer}, nil
}

// ofContainer returns the fields that cAdvisor uses of a container: labels, image, environment.
func (s *cadvisorService) ofContainer(c *state.Container) (*containersapi.Container, error) {
	process := &specs.Process{}
	if c.Process != nil {
		process.Args, process.Env, process.Cwd = c.Process.Args, c.Process.Env, c.Process.Cwd
	}
	spec, err := encodedSpec(process, c.Config.GetAnnotations())
	if err != nil {
		return nil, fmt.Errorf("container %s: %w", c.ID, err)
	}
	return &containersapi.Container{
		ID:        c.ID,
		Labels:    kindLabels(c.Config.GetLabels(), kindContainer),
		Image:     s.fullImageName(c),
		Spec:      spec,
		CreatedAt: timestamppb.New(c.CreatedAt),
		UpdatedAt: timestamppb.New(c.CreatedAt),
	}, nil
}

// ofPause returns the fields that cAdvisor uses of a pod's pause. It assigns the pod's network to
// the pause.
func (s *cadvisorService) ofPause(p *state.Pod) (*containersapi.Container, error) {
	spec, err := encodedSpec(&specs.Process{}, p.Config.GetAnnotations())
	if err != nil {
		return nil, fmt.Errorf("pod sandbox %s: %w", p.ID, err)
	}
	image := s.cfg.PauseImage
	if image == "" {
		image = ownPauseImage
	}
	return &containersapi.Container{
		ID:        p.ID,
		Labels:    kindLabels(p.ShownConfig().GetLabels(), kindSandbox),
		Image:     image,
		Spec:      spec,
		CreatedAt: timestamppb.New(p.CreatedAt),
		UpdatedAt: timestamppb.New(p.CreatedAt),
	}, nil
}

// kindLabels adds the label of a kind to kubelet's labels. Unlike containerd it leaves out the
// image's labels, because an image must not claim that its container belongs to a pod.
func kindLabels(labels map[string]string, kind string) map[string]string {
	all := maps.Clone(labels)
	if all == nil {
		all = map[string]string{}
	}
	all[kindLabel] = kind
	return all
}

// encodedSpec returns the parts of a runtime-spec that cAdvisor can be configured to read. The
// other parts are large, and their computation from the record is expensive.
func encodedSpec(process *specs.Process, annotations map[string]string) (*anypb.Any, error) {
	data, err := json.Marshal(&specs.Spec{Version: specs.Version, Process: process, Annotations: annotations})
	if err != nil {
		return nil, errdefs.Internal("encode spec: %w", err)
	}
	return &anypb.Any{TypeUrl: specType, Value: data}, nil
}

// fullImageName returns the name of a container's image in containerd's form, with registry and tag
// or digest.
func (s *cadvisorService) fullImageName(c *state.Container) string {
	asked := c.Config.GetImage()
	if named, err := reference.ParseDockerRef(asked.GetUserSpecifiedImage()); err == nil {
		return named.String()
	}
	if !isID(asked.GetImage(), c.Image.ID) {
		if named, err := reference.ParseDockerRef(asked.GetImage()); err == nil {
			return named.String()
		}
	}
	return imageName(s.images, c.Image.ID)
}

// cadvisorTasks implements Get of containerd's service Tasks.
type cadvisorTasks struct {
	tasksapi.UnimplementedTasksServer
	service *cadvisorService
}

// Get implements TasksServer. It returns NotFound for a container that is about to start, and
// cAdvisor then retries.
func (t cadvisorTasks) Get(ctx context.Context, req *tasksapi.GetRequest) (*tasksapi.GetResponse, error) {
	id := req.GetContainerID()
	container, pod, err := t.service.find(ctx, id)
	if err != nil {
		return nil, err
	}
	process := &tasktypes.Process{ID: id, ContainerID: id, Status: tasktypes.Status_RUNNING}
	switch {
	case pod != nil && pod.PausePID != 0:
		process.Pid = uint32(pod.PausePID)
	case pod != nil:
		return nil, errdefs.NotFound("the pause of pod sandbox %s does not run", id)
	case container.State() == runtimeapi.ContainerState_CONTAINER_RUNNING:
		process.Pid = uint32(container.PID)
	case container.State() == runtimeapi.ContainerState_CONTAINER_EXITED:
		process.Status, process.ExitStatus = tasktypes.Status_STOPPED, uint32(container.Ended().Code)
		process.ExitedAt = timestamppb.New(container.Ended().FinishedAt)
	default:
		return nil, errdefs.NotFound("container %s was not started", id)
	}
	return &tasksapi.GetResponse{Process: process}, nil
}
