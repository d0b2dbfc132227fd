// Package server is berth's gRPC face: it serves the CRI v1 services
// RuntimeService and ImageService (k8s.io/cri-api) on a unix socket. On a second one, see
// Cadvisor, it answers what kubelet's cAdvisor asks of containerd.
//
// # Contract
//
// The package translates and decides nothing: it checks that a request has the
// fields it needs (InvalidArgument names the one that is missing), calls one
// method of the sandbox manager or the image store, and puts the answer into the
// messages of the API. Reads come from snapshots and wait for nobody. Errors keep
// the gRPC code they got where they arose (package errdefs).
//
// A panic in a handler is answered with Internal, its stack goes to the log, and
// the daemon lives on. Requests are never logged, only the IDs in them: a
// PullImageRequest holds credentials.
//
// RPCs of the API that berth does not have yet answer Unimplemented.
package server

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/image"
	"berth/internal/lograte"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/sandbox/state"
	"berth/sandbox/stream"
)

// MaxMessage is the largest gRPC message sent or taken, in bytes. kubelet's limit
// is the same.
const MaxMessage = 16 << 20

// stopGrace is how long running RPCs get to end after Serve was told to stop, and
// handlers once more after their contexts were cancelled.
const stopGrace = 10 * time.Second

// handshakeTimeout is how long a client may take from its connection to the first frames of HTTP/2.
const handshakeTimeout = 10 * time.Second

// streamGrace is how long streams get to end after the last other request.
const streamGrace = time.Second

// allRequests is more than there can be requests.
const allRequests = math.MaxInt64

// Sandboxes is what the server needs of the sandbox manager.
// See package sandbox for the methods' contracts.
type Sandboxes interface {
	PodResources
	Events
	Statistics
	RuntimeHandlers
	Health
	Traces

	RunPodSandbox(ctx context.Context, cfg *runtimeapi.PodSandboxConfig, handler string) (string, error)
	StopPodSandbox(ctx context.Context, id string) error
	RemovePodSandbox(ctx context.Context, id string) error
	Pod(id string) (*state.Pod, error)
	Pods() []*state.Pod

	CreateContainer(ctx context.Context, podID string, cfg *runtimeapi.ContainerConfig) (string, error)
	StartContainer(ctx context.Context, id string) error
	StopContainer(ctx context.Context, id string, timeout time.Duration) error
	RemoveContainer(ctx context.Context, id string) error
	Container(id string) (*state.Container, error)
	Containers() []*state.Container
	RuntimeSpec(ctx context.Context, id string) (*specs.Spec, error)
	ExecSync(ctx context.Context, id string, cmd []string, timeout time.Duration) (*stream.Result, error)
	UpdateContainerResources(ctx context.Context, id string, resources *runtimeapi.LinuxContainerResources) error
	ReopenContainerLog(ctx context.Context, id string) error

	Reachable

	NetworkStatus(ctx context.Context) error
	UpdatePodCIDR(ctx context.Context, cidrs string) error
	Waits() []task.Wait
}

// Images is what the server needs of the image store.
// See package image for the methods' contracts.
type Images interface {
	Pull(ctx context.Context, ref string, auth *runtimeapi.AuthConfig) (*image.Image, error)
	Get(ref string) (*image.Image, error)
	List() []*image.Image
	Remove(ctx context.Context, ref string) error
	Usage(ctx context.Context) (image.Usage, error)
	Progress() []image.PullProgress
	Driver() rootfs.Kind // the form in which layers are made
	Asleep() []string    // IDs of images that this kernel can't mount
}

// Config is what the server tells about the runtime it fronts.
type Config struct {
	Version        string // runtime_version, semver
	SystemdCgroup  bool   // the cgroup driver in use, else cgroupfs
	UserNamespaces bool   // pods can have user namespaces, on the node's network too
	Settings       any    // the configuration in use, for verbose Status; encodes as JSON

	// Network tells, for verbose Status, which network pods join, or why none. It
	// answers from memory; nil: not told.
	Network func() cni.Info

	// PassedLimit counts, for verbose Status, the waits that took longer than they should; nil: not told.
	PassedLimit func() uint64

	Sessions Sessions // of Exec, Attach and PortForward

	Tracing Tracing // nil: no operation is exported

	// Changing is called before each request that makes, starts, stops or removes something, and what it returns after it; neither
	// blocks. nil: nobody wants to know.
	Changing func() (changed func())
}

// Server serves CRI. Make one with New.
type Server struct {
	log      *slog.Logger
	grpc     *grpc.Server
	grace    time.Duration // stopGrace, shorter in tests
	tracing  Tracing       // nil: none
	changing func() func() // Config.Changing

	requests *semaphore.Weighted // held by each unary request, and by stop

	stopping   context.Context // ends when Serve was told to stop: streams without end end with it
	endStreams context.CancelFunc
}

// New returns a server that passes requests on to pods and images.
func New(cfg Config, pods Sandboxes, images Images, log *slog.Logger) *Server {
	s := &Server{log: log, grace: stopGrace, tracing: cfg.Tracing, changing: cfg.Changing, requests: semaphore.NewWeighted(allRequests)}
	s.stopping, s.endStreams = context.WithCancel(context.Background())
	s.grpc = grpc.NewServer(
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.SharedWriteBuffer(true),
		grpc.WaitForHandlers(true),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.Creds(peerCredentials{log: log}),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.UnaryInterceptor(s.unary),
		grpc.StreamInterceptor(s.stream),
	)
	s.grpc.RegisterService(runtimeServiceDesc(), &runtimeService{cfg: cfg, stopping: s.stopping, pods: pods, images: images, log: log})
	runtimeapi.RegisterImageServiceServer(s.grpc, &imageService{images: images, pods: pods})
	return s
}

// Serve answers requests on l until ctx ends or l fails. It closes l. When ctx
// ends it takes no new requests and gives the running ones stopGrace to end; then
// it cancels their contexts. It returns nil if it was told to stop.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		s.stop()
	}()
	err := s.grpc.Serve(l)
	cancel()
	<-stopped
	if err != nil {
		return fmt.Errorf("serve CRI on %s: %w", l.Addr(), err)
	}
	return nil
}

// stop ends the gRPC server: politely, then by cancelling what still runs, and
// finally without the handlers that do not end even then. Streams have streamGrace once all other
// requests have ended: one whose client does not read ends only with its connection.
func (s *Server) stop() {
	s.endStreams()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.grpc.GracefulStop() // ends with Stop, too
	}()
	ctx, cancel := context.WithTimeout(context.Background(), s.grace)
	defer cancel()
	if s.requests.Acquire(ctx, allRequests) == nil {
		select {
		case <-ended:
			return
		case <-ctx.Done():
		case <-time.After(streamGrace):
			s.log.Info("clients that do not read what they asked for are cut off")
		}
	} else {
		s.log.Warn("requests still run, cancelling them", "after", s.grace)
	}
	if !within(s.grace, s.grpc.Stop) {
		s.log.Error("requests do not end although they were cancelled, leaving them")
	}
}

// within runs f and reports whether it returned in time. A late f is left behind:
// the process is about to end.
func within(limit time.Duration, f func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// runtimeService implements CRI's RuntimeService.
type runtimeService struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	cfg      Config
	stopping context.Context
	pods     Sandboxes
	images   Images
	log      *slog.Logger

	unmeasured struct{ containers, pods, details lograte.Limiter } // warnings
}

// imageService implements CRI's ImageService.
type imageService struct {
	runtimeapi.UnimplementedImageServiceServer
	images Images
	pods   interface {
		Statistics
		RuntimeHandlers
	}
}
